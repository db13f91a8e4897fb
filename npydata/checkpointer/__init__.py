"""Save training without stopping it, and without ever losing a checkpoint to a crash.

How a tensor reaches the disk, in the order of the files here:

    checkpointer.py  save(): a Snapshot is planned, and one worker thread started
    snapshot.py      state -> names and tree -> layout of the file -> copies into one staging buffer
    device.py        the same copies from an accelerator, on a side stream
    writer.py        staging buffer -> file, with O_DIRECT, each part as soon as it is copied
    commit.py        temporary folder -> fsync -> rename -> ``latest`` -> old ones go
    load.py          the way back, and verification
    state.py         what else decides the next step: counters, random generators, the loader
    verify.py        which checkpoint of a folder can be resumed from, whoever wrote it
"""
