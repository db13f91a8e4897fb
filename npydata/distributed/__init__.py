"""Save and load what is spread over many processes.

``torchrun`` and ``torch.distributed`` do the spreading. Here, each rank writes its share, and rank
0 commits all of it at once: coordinator.py (messages through the group's store), plan.py (who
writes what), save.py and load.py.
"""
