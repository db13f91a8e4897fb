"""Save training without stopping it, and without ever losing a checkpoint to a crash.

How a save travels, one file per step::

    checkpointer.py  save()          -> one Save in flight: its Snapshot, and its worker thread
    snapshot.py      nested state    -> names, tree -> Layout of each file -> Copies into one buffer
    device.py        Copies          -> the same from an accelerator, queued on a side stream
    writer.py        buffer          -> files in a private folder, each part once it is filled
    commit.py        private folder  -> manifest, rename, ``latest``; old checkpoints are removed
    state.py         everything else -> training_state.json: counters, random generators, loader

And how a checkpoint is found again::

    commit.py        a root          -> latest_checkpoint: the newest complete folder
    load.py          that folder     -> load_checkpoint, verify_checkpoint: one manifest's files
    scan.py          any folder      -> scan: checkpoints of any kind, complete or not, and why

A *root* is a folder of checkpoints. A *run* is the training run that commits into it, over as many
processes as it takes: a process that loads a checkpoint of a root continues that run there. A run's
``keep_last`` removes only its own checkpoints.

Three kinds of threads take part. The training thread calls ``save``, and only it can tell whether a
tensor was changed before it was copied: it gives the *verdict*. Copy threads fill the buffer, then
compute checksums. The worker starts them, writes what they have filled, waits for the verdict, and
commits. When training may go on, and when the verdict comes, depends on ``snapshot=``::

    host     CPU tensors are copied before save returns, and judged there. Copies from a GPU are
             queued, and later work on the training stream waits on the device until they are read
    device   the same, but GPU tensors are first cloned on the GPU: training waits for the clone
    overlap  what a protected optimizer changes is copied after save has returned; judged before
             that optimizer's next step, in wait or the next save, or at exit

Errors: one that stops ``save`` before it returns is raised there, and cancels the save. Later ones
are kept in ``Save.error`` until ``wait`` or the next ``save`` raises them.
"""
