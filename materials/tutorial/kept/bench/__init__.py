"""``npydata bench``: what the parts reach on this machine, next to others and to its limits.

A table is a module here (``dataset``, ``loader``, ``reader``, ``checkpoint``, ``distributed``,
``sweep``); what stands in the tables is registered in :mod:`tutorial.kept.bench.baselines`.
"""
