"""Train a table of next tokens on two ranks, here in turn in one process, and look it over."""

import numpy as np
import torch

import npydata

DOCUMENTS, LENGTH = 256, 32
BATCH, WORLD_SIZE, SEED = 4, 2, 1234
CLASSES = 16


class Table(torch.nn.Module):
    """For every token of the vocabulary, a guess at the class of the one that follows."""

    def __init__(self):
        super().__init__()
        self.guesses = torch.nn.Embedding(DOCUMENTS * LENGTH, CLASSES)
        torch.nn.init.zeros_(self.guesses.weight)

    def losses(self, x, y):
        guesses = self.guesses(x).flatten(0, 1)
        wanted = y.flatten() % CLASSES
        return torch.nn.functional.cross_entropy(guesses, wanted, reduction="none").view(x.shape)


def make_loaders(data):
    """One loader a rank; each rank has a seed of its own, so that no two draw the same numbers."""
    return [
        npydata.AsyncDataLoader(
            data, batch_size=BATCH, shuffle=True, seed=SEED + rank, rank=rank, world_size=WORLD_SIZE
        )
        for rank in range(WORLD_SIZE)
    ]


def train_epoch(table, loaders):
    """An epoch on all ranks, which step together; return the documents that each was given."""
    optimizer = torch.optim.SGD(table.parameters(), lr=300)
    given = [[] for _ in loaders]
    for batches in zip(*loaders, strict=True):
        loss = sum(table.losses(x, y).mean() for x, y in batches) / len(loaders)
        optimizer.zero_grad()
        loss.backward()  # adds up the gradients of both ranks; two GPUs exchange theirs
        optimizer.step()
        for documents, (x, _) in zip(given, batches, strict=True):
            documents += (x[:, 0] // LENGTH).tolist()
    return given


def loss_by_document(table, data):
    with torch.no_grad():
        return table.losses(*data.fetch(range(len(data)))).mean(dim=1).numpy()


def make_data(folder):
    """A file of documents that share no token, so that none can be learnt from another."""
    np.save(folder / "tokens.npy", np.arange(DOCUMENTS * LENGTH, dtype=np.uint16))
    return npydata.MmapDataset(folder / "tokens.npy", seq_len=LENGTH - 1)


def reproduce(folder):
    data, table = make_data(folder), Table()
    loaders = make_loaders(data)
    for epoch in range(2):
        for rank, documents in enumerate(train_epoch(table, loaders)):
            np.savetxt(folder / f"given_epoch_{epoch}_rank_{rank}.txt", documents, fmt="%d")
        losses = loss_by_document(table, data)
        np.savetxt(folder / f"loss_after_epoch_{epoch}.txt", losses, fmt="%.3f")
