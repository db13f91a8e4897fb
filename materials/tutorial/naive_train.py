"""A common way to train a tiny language model: each line works, nobody asked what it waits for.

Run it as `python naive_train.py TOKENS.npy FOLDER`.
"""

import sys
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

BATCH, SEQ_LEN, STEPS, SAVE_EVERY, PAIRS = 64, 32, 60, 6, 65_536


class Windows(Dataset):
    def __init__(self, path):
        self.path = path

    def __len__(self):
        return STEPS * BATCH

    def __getitem__(self, index):
        tokens = np.load(self.path, mmap_mode="r").reshape(-1)
        start = torch.randint(len(tokens) - SEQ_LEN - 1, ()).item()
        window = torch.from_numpy(tokens[start : start + SEQ_LEN + 1].astype(np.int64))
        return window[:-1], window[1:]


class TinyLM(nn.Module):
    def __init__(self, vocab):
        super().__init__()
        self.pairs = nn.Embedding(PAIRS, 32)
        self.mlp = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, vocab))

    def forward(self, x):
        previous = nn.functional.pad(x, (1, 0))[:, :-1]
        return self.mlp(self.pairs((1009 * previous + x) % PAIRS))


def train_step(model, optimizer, x, y):
    loss = nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


def main(path, folder):
    model = TinyLM(vocab=int(np.load(path).max()) + 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    batches = DataLoader(Windows(path), batch_size=BATCH)
    for step, (x, y) in enumerate(batches, start=1):
        loss = train_step(model, optimizer, x, y)
        if step % SAVE_EVERY == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(state, folder / f"step_{step:02d}.pt")
            print(f"step {step}: loss {loss:.2f}")
    for file in sorted(folder.glob("step_*.pt")):
        weight = torch.load(file)["model"]["mlp.0.weight"]
        print(f"{file.name}: weight norm {weight.norm():.2f}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
