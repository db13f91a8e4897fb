"""What runs inside a watched process: the standard library only, and no module of npydata.

The watched interpreter need not be ours. It finds ``sitecustomize`` through ``PYTHONPATH``; that
loads its neighbours by their path.
"""
