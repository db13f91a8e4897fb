"""Token files with documents of chosen lengths, and what a packed batch says, in plain Python."""

from itertools import pairwise

import numpy as np
import torch

from npydata import write_tokens

EOT = 0


def write_datatrove(folder, lengths, name="a"):
    """Write documents of these lengths whose tokens are 1, 2, 3, ... over the whole file."""
    ends = np.cumsum(np.array(lengths, np.int64))
    count = int(ends[-1]) if len(ends) else 0
    path = folder / f"{name}.ds"
    np.arange(1, count + 1, dtype="<u4").tofile(path)
    ends.astype("<u8").tofile(folder / f"{name}.ds.index")
    return path


def write_with_ends(path, documents):
    """Write documents one after the other, with the token that ends each."""
    write_tokens(path, [np.array([*document, EOT], np.uint32) for document in documents])
    return path


def told(batch):
    """Return the (document, tokens, targets) of each sequence of a batch, without padding."""
    bounds = batch.cu_seqlens.tolist()
    flat = [part.reshape(-1).tolist() for part in
            (batch.inputs, batch.targets, batch.position_ids, batch.document_ids)]  # fmt: skip
    assert bounds[0] == 0
    assert bounds[-1] == len(flat[0])
    assert batch.max_seqlen == max(np.diff(bounds))
    found = []
    for begin, end in pairwise(bounds):
        inputs, targets, positions, documents = (part[begin:end] for part in flat)
        assert positions == list(range(end - begin))
        assert len(set(documents)) == 1
        assert begin // batch.inputs.shape[-1] == (end - 1) // batch.inputs.shape[-1]
        if documents[0] >= 0:
            found.append((documents[0], inputs, targets))
        else:
            assert set(inputs) == {0}
            assert set(targets) == {-100}
    return found


def same(one, other):
    """Whether two lists of batches hold the same values."""
    return len(one) == len(other) and all(
        all(a.equal(b.to(a)) for a, b in zip(x, y, strict=True) if isinstance(a, torch.Tensor))
        for x, y in zip(one, other, strict=True)
    )
