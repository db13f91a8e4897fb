"""The prefetching loader: order, worker threads, hand-over, tuning.

How a batch travels, one file a step::

    sampler.py   number k           -> Plan: the samples of batch k, and the place after it
    fetch.py     Plan               -> Delivery: the batch, fetched, transformed, on its device
    prefetch.py  worker threads     -> Deliveries ahead of the consumer, handed over in order
    iterator.py  Delivery           -> the batch, for the consumer; the cursor moves behind it
    loader.py    settings and cursor -> one iterator an epoch; the state that resumes it
"""
