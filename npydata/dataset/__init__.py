"""The dataset: token files, samples of them, packed rows, mixtures, and what prepares them.

How an index becomes tokens, one file a step::

    datasets.py     indices     -> starts: which token each window begins at, over all files
    windows.py      the arithmetic of that: rows and strides, random draws, hashes
    token_file.py   a path      -> TokenFile: shape and dtype, by a header that formats.py read
    backend.py      starts      -> (B, T+1) tokens in the file's own dtype: the one gather
    datasets.py     tokens      -> x and y, int64: the two casts

Packed rows ask an index that is made once, when the dataset is opened::

    documents.py    a file      -> where its documents end
    packing.py      ends        -> PackIndex: for each row, its spans of documents
    packed.py       rows        -> their spans, read one by one -> PackedBatch

``mixture.py`` says which source a sample comes from, by arithmetic alone (each source shuffled by
``permutation.py``), lets the sources fetch, and joins what they give with ``batches.py``.
``fingerprint.py`` tells data apart; ``prepare.py`` and ``inspect.py`` are behind the command line.
"""
