"""Save and load state that is spread over many processes.

``torchrun`` and ``torch.distributed`` spread it. Each rank writes its share with the parts of
:mod:`npydata.checkpointer`, and rank 0 commits all of it at once. One file per step::

    save.py         save_distributed -> a plan from each rank, an answer from rank 0; then one Save
                    on every rank, as in a single process
    coordinator.py  plan, answer     -> messages through the group's store, a time-out on every wait
    plan.py         nested state     -> LocalState: the Shards that this rank has
                    all Shards       -> share_out: which of them each rank writes
    load.py         a folder         -> model and optimizer filled in place, each rank its slices

The messages of a save, under a key that rank 0 draws at random and publishes as ``rank_0``::

    thread that trains   plan     each rank to rank 0    what it does, its shards, its tree
                         answer   rank 0 to each rank    the private folder, the shards to write
    worker               done     each rank to rank 0    sizes and checksums; its shards are on disk
                         outcome  rank 0 to each rank    committed, or why not
                         left     each rank to rank 0    it knows, so rank 0's process may exit

Any of them may be ``{"error": why}`` instead. A load is ``plan`` and ``answer`` alone: before any
rank changes its model, all of them know that they load the same commit and that each of them can.
"""
