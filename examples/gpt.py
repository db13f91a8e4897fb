"""A small GPT: the model that the examples train. It does not depend on npydata."""

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention


class GPT(nn.Module):
    """A decoder-only transformer with learned positions and pre-norm blocks.

    ``model(tokens)`` takes token ids, int64 ``(batch, length)`` of length ``context`` at most, and
    returns logits ``(batch, length, vocab_size)`` for the token after each position.
    """

    def __init__(
        self,
        vocab_size: int,
        context: int,
        *,
        width: int = 64,
        layers: int = 2,
        heads: int = 4,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab_size, width)
        self.positions = nn.Embedding(context, width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab_size, bias=False)
        self.apply(init_small)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits of the next token at each position."""
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.dropout(self.tokens(tokens) + self.positions(places))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Block(nn.Module):
    """A transformer block: attention to earlier positions, then an MLP."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        if width % heads:
            raise ValueError(f"width {width} is not a multiple of {heads} heads")
        self.heads = heads
        self.before_attention, self.before_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Add the outputs of attention and the MLP to ``x``."""
        x = x + self.dropout(self.attend(self.before_attention(x)))
        return x + self.dropout(self.mlp(self.before_mlp(x)))

    def attend(self, x: Tensor) -> Tensor:
        """Mix each position with those before it: causal attention, several heads."""
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in self.qkv(x).chunk(3, dim=-1)
        )
        mixed = scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.project(mixed.transpose(1, 2).flatten(2))


def init_small(module: nn.Module) -> None:
    """Start with small weights, so that the first guess is that all tokens are equally likely."""
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> float:
    """Learn from one batch; return its loss."""
    loss = cross_entropy(model(x).flatten(0, 1), y.flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()
