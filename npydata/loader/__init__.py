"""The prefetching loader: order, worker threads, hand-over, tuning.

How a batch travels, one file per step::

    sampler.py   number k           -> Plan: the samples of batch k, and the position after it
    fetch.py     Plan               -> Delivery: the batch, fetched, transformed, on its device
    prefetch.py  worker threads     -> Deliveries ahead of the consumer, handed over in order
    iterator.py  Delivery           -> the batch, for the consumer; the cursor moves past it
    loader.py    settings and cursor -> one iterator per epoch; the state that resumes it

``iter(loader)`` makes new ones of these for its epoch, and starts the threads. Each runs
``worker_loop``: claim a number while there is room, make its Deliveries, put them into the
``ReorderBuffer``. A number stands for one batch, or for several small batches of windows, which are
fetched as one. The consumer's ``next`` takes the Delivery whose turn it is, or raises the error
that came in its place. Threads know the buffer and the Fetcher, never the iterator: dropping the
iterator closes the buffer, and they end.

A batch carries its own position: ``Plan.after`` goes with it, and becomes ``Cursor.at`` (state.py)
when it is delivered. So ``state_dict()`` counts what the consumer got, not what was made ahead.

Memory for a batch comes from ``buffers.py``, pinned where a GPU copies from it. ``device.py`` moves
the batch: the worker waits for the copy, the consumer only marks the result as in use.
``tuning.py`` measures whole loaders.
"""
