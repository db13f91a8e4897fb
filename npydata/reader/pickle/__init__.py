"""A pickle machine that runs nothing, and what torch's and numpy's calls mean to it.

How a pickle becomes values, one module per step::

    machine.py   bytes             -> opcodes: values, containers, a memo; nothing is called
    torch.py     names, storages'  -> Global, TypedStorage, TensorSpec: what opcodes for names, ids
                 ids and calls        and calls push in place of what they would import and run
    plain.py     calls that make   -> dictionaries, sets, bytes, numpy's arrays
                 plain values
    budget.py    what all of this may cost
    objects.py   the descriptions that all of these make: they have no behaviour

The pickle doesn't say where a storage is: the format (zip.py, legacy.py, tar.py) sets that later.
"""
