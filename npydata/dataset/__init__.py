"""The datasets: token files, samples from them, packed rows, mixtures, and their preparation.

How an index becomes tokens, one file per step::

    datasets.py     indices     -> starts: which token each window begins at, over all files
    windows.py      the arithmetic for that: rows and strides, random draws, hashes
    token_file.py   a path      -> TokenFile: shape and dtype, by a header that formats.py read
    backend.py      starts      -> (B, T+1) tokens in the file's own dtype: the one gather
    datasets.py     tokens      -> x and y, int64: the two casts

Packed rows use an index that is made once, when the dataset is opened::

    documents.py    a file      -> where its documents end
    packing.py      ends        -> PackIndex: for each row, its spans of documents
    packed.py       rows        -> their spans, read one by one -> PackedBatch

``mixture.py`` computes which source a sample comes from (``permutation.py`` shuffles each source),
has the sources fetch, and joins their samples with ``batches.py``. ``fingerprint.py`` tells data
apart; ``prepare.py`` and ``inspect.py`` implement the commands.
"""
