"""Attention that stays inside documents, for the packed rows of `npydata.PackedDataset`.

    python examples/masks.py tokens.npy --eot-id 0

Two ways with the same result: a plain block-diagonal mask for `scaled_dot_product_attention`, and a
`BlockMask` for `flex_attention`, which skips what is masked. A variable-length attention kernel
takes `batch.cu_seqlens` and `batch.max_seqlen` as they are.
"""

import argparse

import torch
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

from npydata import NpyDataError, PackedDataset


def document_mask(document_ids: torch.Tensor) -> torch.Tensor:
    """Return what each position may attend to, its document so far: `(B, 1, T, T)`."""
    same = document_ids[:, None, :, None] == document_ids[:, None, None, :]
    return same.tril()


def document_block_mask(document_ids: torch.Tensor) -> BlockMask:
    """Return the same mask as `flex_attention` wants it."""

    def allowed(
        b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, kv: torch.Tensor
    ) -> torch.Tensor:
        return (document_ids[b, q] == document_ids[b, kv]) & (q >= kv)

    rows, length = document_ids.shape
    return create_block_mask(allowed, rows, None, length, length, device=str(document_ids.device))


class TinyModel(torch.nn.Module):
    """One attention layer, enough to see whether a document attends to its neighbour."""

    def __init__(self, vocab_size: int, longest: int, width: int = 32, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.tokens = torch.nn.Embedding(vocab_size, width)
        self.positions = torch.nn.Embedding(longest, width)
        self.project = torch.nn.Linear(width, 3 * width)
        self.head = torch.nn.Linear(width, vocab_size)

    def forward(
        self, inputs: torch.Tensor, position_ids: torch.Tensor, mask: torch.Tensor | BlockMask
    ) -> torch.Tensor:
        """Return logits, `(B, T, vocab_size)`."""
        x = self.tokens(inputs) + self.positions(position_ids)
        split = self.project(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        q, k, v = split.unbind()
        if isinstance(mask, BlockMask):
            found = flex_attention(q, k, v, block_mask=mask)
        else:
            found = scaled_dot_product_attention(q, k, v, attn_mask=mask)
        assert isinstance(found, torch.Tensor)
        logits: torch.Tensor = self.head(found.transpose(1, 2).flatten(2))
        return logits


def losses(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the loss at each position, 0 where there is nothing to predict, `(B, T)`."""
    return cross_entropy(logits.transpose(1, 2), targets, reduction="none")


@torch.no_grad()
def main() -> None:
    """Print the loss of some packed rows with both masks, and without any."""
    parser = argparse.ArgumentParser(description="Losses of packed rows under both masks.")
    parser.add_argument("tokens")
    parser.add_argument("--eot-id", type=int)
    parser.add_argument("--seq-len", type=int, default=256)
    args = parser.parse_args()
    try:
        rows = PackedDataset(args.tokens, args.seq_len, eot_id=args.eot_id)
    except NpyDataError as error:
        parser.error(str(error))
    batch = rows.fetch(range(min(4, len(rows))))
    torch.manual_seed(0)
    model = TinyModel(int(batch.inputs.max()) + 1, args.seq_len)
    causal = torch.ones(args.seq_len, args.seq_len, dtype=torch.bool).tril()
    masks = {
        "block-diagonal": document_mask(batch.document_ids),
        "flex_attention": document_block_mask(batch.document_ids),
        "none: texts see their neighbours": causal,
    }
    for name, mask in masks.items():
        logits = model(batch.inputs, batch.position_ids, mask)
        print(f"{losses(logits, batch.targets).sum().item():.6f}  {name}")


if __name__ == "__main__":
    main()
