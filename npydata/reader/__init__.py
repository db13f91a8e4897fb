"""Checkpoints by name: files, folders and URLs, read lazily, without running any code in them.

How ``open_checkpoint(path)`` finds out what is there, one module per step::

    open.py         a path        -> its file, or the files of a set or folder, and their formats
    file.py         a file        -> File: its bytes, read by range (remote.py: of a URL)
    formats/*.py    a File        -> Contents: values and tensors, and where each storage is
    pickle/*.py     data.pkl      -> the same, for torch's formats: plain values, TensorSpecs
    names.py        nested values -> {"model.fc.weight": TensorSpec, "step": 7}
    checkpoint.py   Contents      -> LazyCheckpoint: the mapping that the caller gets

So far only headers and pickles have been read. A tensor is read when you ask for it::

    tensor.py       checkpoint[name]      -> its whole storage, mapped, and a view of it
                    get_slice(name)[2:5]  -> a TensorSpec of the slice, then only its bytes
    load.py         load()                -> many at once, in file order, by a few threads
    targets.py      load(into=model)      -> the model's tensors by name, for load.py to fill

A tensor's bytes are found through three records. A ``TensorSpec`` is a view (dtype, shape, stride,
offset) of a ``Storage``, which several tensors may share (both in pickle/objects.py). The storage's
bytes are an ``Extent``: a ``File``, an offset and a length (file.py). Some formats describe a
storage twice; ``Extent.check`` compares the second description just before the bytes are read. A
tensor in several pieces has ``chunks`` in place of a storage; each chunk resolves to a TensorSpec.

Errors are raised as ``FormatError``, without the file's name; ``naming`` (file.py) wraps the public
calls and adds the name. What Python raises for malformed data becomes one in ``malformed_means``.

convert.py writes safetensors, inspect.py implements ``npydata inspect``, and source.py returns
storages as raw bytes.
"""
