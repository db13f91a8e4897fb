"""Open any PyTorch checkpoint in milliseconds, read one tensor or a slice, run nothing in it.

Begin at ``open.py``. Each kind of file is a module in ``containers``. Built in
``notebooks/06_lazy_checkpoint``.
"""
