"""Small trainings, each with one illness, for the doctor: script, and the cause it has to name."""

from textwrap import dedent
from typing import NamedTuple

HEAD = """
import os, time
import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

torch.set_num_threads(1)
model = torch.nn.Linear(64, 64)
optimizer = torch.optim.AdamW(model.parameters())


def step(seconds=0.002):
    time.sleep(seconds)  # a GPU's part of the step
    optimizer.zero_grad()
    model(torch.ones(4, 64)).square().mean().backward()
    optimizer.step()


class Windows(Dataset):
    def __init__(self, tokens, length=1024):
        self.tokens, self.length = tokens, length

    def __len__(self):
        return len(self.tokens) // self.length - 1

    def __getitem__(self, index):
        begin = index * self.length
        window = self.tokens[begin : begin + self.length + 1].astype(np.int64)
        return torch.from_numpy(window[:-1]), torch.from_numpy(window[1:])


def write_whole(path, state):
    with open(path + ".new", "wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(path + ".new", path)
"""


class SickRun(NamedTuple):
    """A script, and the cause that the doctor has to name first; "" of a healthy one."""

    cause: str
    body: str
    where: str = ""
    """Part of the line that the doctor has to name."""

    @property
    def script(self):
        return HEAD + dedent(self.body)


TOKENS = "tokens = np.arange(1 << 22, dtype=np.uint16)"
RUNS = {
    "healthy": SickRun("", """
        tokens = np.arange(1 << 22, dtype=np.uint16)
        for x, y in DataLoader(Windows(tokens), batch_size=8):
            step(0.02)
            if x[0, 0] > 60_000 or x[0, 0] == 49152:
                break
    """),
    "per item": SickRun("per_item_fetch", """
        tokens = np.arange(1 << 24, dtype=np.uint16)
        for x, y in DataLoader(Windows(tokens, 64), batch_size=256, shuffle=True):
            step()
    """, "train.py"),
    "worker copies": SickRun("worker_copies", """
        class Batches(Dataset):
            ready = torch.zeros(64, 4, 16384)

            def __len__(self):
                return 150

            def __getitem__(self, index):
                return [part.clone() for part in self.ready]

        for batch in DataLoader(Batches(), batch_size=None, num_workers=2):
            step(0.0)
    """),
    "cold reads": SickRun("cold_reads", """
        file = np.memmap("tokens.bin", np.uint16, "w+", shape=(1 << 28,))
        file[:: 1024] = 1
        file.flush()
        del file
        tokens = np.memmap("tokens.bin", np.uint16, "r")
        with open("tokens.bin") as opened:
            os.fsync(opened.fileno())
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        for count, (x, y) in enumerate(DataLoader(Windows(tokens), batch_size=32, shuffle=True)):
            step()
            if count == 60:
                break
    """, "train.py"),
    "slow transform": SickRun("slow_transform", """
        class Renumbered(Windows):
            def __getitem__(self, index):
                x, y = super().__getitem__(index)
                return torch.tensor([self.number(i) for i in x.tolist()]), y

            def number(self, i):
                return (i * 31 + 7) % 5000

        tokens = np.arange(1 << 21, dtype=np.uint16)
        for x, y in DataLoader(Renumbered(tokens, 4096), batch_size=8):
            step()
    """, "train.py"),
    "a transform's own functions": SickRun("slow_transform", """
        def blurred(image):
            kernel = np.array([1, 4, 6, 4, 1], np.float32) / 16
            for row in image:
                row[:] = np.convolve(row, kernel, "same")
            return image

        class Images(Dataset):
            images = np.ones((64, 240, 40), np.float32)

            def __len__(self):
                return 1500

            def __getitem__(self, index):
                return torch.from_numpy(blurred(self.images[index % 64].copy())), index

        for x, y in DataLoader(Images(), batch_size=32):
            step(0.001)
    """, "blurred"),
    "large items by workers": SickRun("worker_copies", """
        class Clips(Dataset):
            clips = torch.zeros(64, 3, 16, 128, 128, dtype=torch.uint8)

            def __len__(self):
                return 64 * 100

            def __getitem__(self, index):
                return self.clips[index % 64], index % 10

        for x, y in DataLoader(Clips(), batch_size=64, num_workers=2):
            step(0.0)
    """),
    "cold reads by the loop": SickRun("cold_reads", """
        file = np.memmap("tokens.bin", np.uint16, "w+", shape=(1 << 29,))
        file[:: 1024] = 1
        file.flush()
        del file
        tokens = np.memmap("tokens.bin", np.uint16, "r")
        with open("tokens.bin") as opened:
            os.fsync(opened.fileno())
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

        def get_batch():
            begins = torch.randint(len(tokens) - 65, (32,)).tolist()
            rows = [torch.from_numpy(tokens[at : at + 65].astype(np.int64)) for at in begins]
            return torch.stack(rows)

        for _ in range(60):
            x = get_batch()
            step(0.001)
    """, "train.py"),
    "a thread that counts": SickRun("gil_threads", """
        import threading

        def count(words="the quick brown fox " * 50):
            while True:
                seen = {}
                for word in words.split():
                    seen[word] = seen.get(word, 0) + 1

        threading.Thread(target=count, daemon=True).start()
        tokens = np.arange(1 << 16, dtype=np.uint16)
        for x, y in DataLoader(Windows(tokens), batch_size=8):
            for _ in range(20):
                model(torch.ones(4, 64)).square().mean().backward()
            step(0.0)
    """, "count"),
    "torch.save": SickRun("save_stall", """
        tokens = np.arange(1 << 20, dtype=np.uint16)
        state = {"weights": torch.zeros(1 << 24)}
        for count, (x, y) in enumerate(DataLoader(Windows(tokens), batch_size=8)):
            step(0.01)
            if count % 20 == 19:
                write_whole(f"step-{count}.pt", state)
    """, "write_whole"),
    "page cache": SickRun("page_cache", """
        with open("tokens.bin", "wb") as file:
            for _ in range(16):
                file.write(os.urandom(1 << 22))
            os.fsync(file.fileno())
        tokens = np.memmap("tokens.bin", np.uint16, "r")
        tokens.max()
        for count, (x, y) in enumerate(DataLoader(Windows(tokens), batch_size=32, shuffle=True)):
            step(0.002)
            if count % 60 == 59:
                write_whole("step.pt", model.state_dict())
                tokens._mmap.madvise(4)  # as a save does that is larger than the memory left
                with open("tokens.bin") as file:
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            if count == 400:
                break
    """, "write_whole"),
    "dcp": SickRun("dcp_stall", """
        import torch.distributed.checkpoint as dcp

        tokens = np.arange(1 << 20, dtype=np.uint16)
        state = {f"w{k}": torch.zeros(1 << 22) for k in range(4)}
        for count, (x, y) in enumerate(DataLoader(Windows(tokens), batch_size=8)):
            step(0.01)
            if count % 20 == 19:
                dcp.save(state, checkpoint_id=f"step-{count}", no_dist=True)
    """, "train.py"),
    "torn save": SickRun("torn_save", """
        tokens = np.arange(1 << 20, dtype=np.uint16)
        for count, (x, y) in enumerate(DataLoader(Windows(tokens), batch_size=8)):
            step(0.02)
            if count % 20 == 19:
                torch.save(model.state_dict(), "last.pt")
    """, "train.py"),
    "unsafe load": SickRun("unsafe_load", """
        write_whole("theirs.pt", model.state_dict())
        model.load_state_dict(torch.load("theirs.pt", weights_only=False))
        tokens = np.arange(1 << 20, dtype=np.uint16)
        for x, y in DataLoader(Windows(tokens), batch_size=8):
            step(0.02)
    """, "train.py"),
    "leak": SickRun("leak", """
        class Cached(Windows):
            def __init__(self, tokens):
                super().__init__(tokens)
                self.seen = []

            def __getitem__(self, index):
                item = super().__getitem__(index)
                self.seen.append([*item, torch.ones(8192)])
                return item

        tokens = np.arange(1 << 22, dtype=np.uint16)
        for x, y in DataLoader(Cached(tokens), batch_size=16):
            step(0.02)
    """),
    "interpreter lock": SickRun("gil_step", """
        def histogram(row):
            counts = {}
            for token in row:
                counts[token % 97] = counts.get(token % 97, 0) + 1
            return counts

        tokens = np.arange(1 << 21, dtype=np.uint16)
        for x, y in DataLoader(Windows(tokens), batch_size=16):
            histogram(x.flatten().tolist() * 8)
            step(0.0)
    """, "histogram"),
    "worker threads in Python": SickRun("gil_workers", """
        import npydata

        class Renumbered(Windows):
            def __getitem__(self, index):
                x, y = super().__getitem__(index)
                return torch.tensor([self.number(i) for i in x.tolist()]), y

            def number(self, i):
                for _ in range(8):
                    i = (i * 31 + 7) % 5000
                return i

        layer, tokens = torch.ones(256, 256), np.arange(1 << 22, dtype=np.uint16)
        loader = npydata.AsyncDataLoader(
            Renumbered(tokens), batch_size=16, num_workers=1, prefetch_factor=4
        )
        for x, y in loader:
            for _ in range(30):  # each lets go of the lock, and has to get it again
                layer @ layer
            step(0.0)
    """, "train.py"),
    "items that wait": SickRun("item_waits", """
        class Remote(Windows):
            def __getitem__(self, index):
                time.sleep(0.01)  # as long as a server may take
                return super().__getitem__(index)

        tokens = np.arange(1 << 20, dtype=np.uint16)
        for x, y in DataLoader(Remote(tokens), batch_size=8, num_workers=2):
            step()
    """, "__getitem__"),
    "late batches": SickRun("uneven_batches", """
        class Documents(Windows):
            def __getitem__(self, index):
                if index % 160 == 7:
                    time.sleep(0.4)  # one that is long
                return super().__getitem__(index)

        tokens = np.arange(1 << 21, dtype=np.uint16)
        for x, y in DataLoader(Documents(tokens), batch_size=16, num_workers=2):
            step(0.005)
    """, "__getitem__"),
    "validation": SickRun("slow_transform", """
        class Slow(Windows):
            def __getitem__(self, index):
                sum(k * 31 % 5000 for k in range(150_000))
                return super().__getitem__(index)

        tokens = np.arange(1 << 20, dtype=np.uint16)
        train = DataLoader(Windows(tokens), batch_size=8, num_workers=2, persistent_workers=True)
        validate = DataLoader(Slow(tokens[: 1 << 17]), batch_size=16)
        for epoch in range(4):
            for x, y in train:
                step(0.005)
            with torch.no_grad():
                for x, y in validate:
                    model(torch.ones(4, 64))
    """, "genexpr"),
    "our saves, waited for": SickRun("save_stall", """
        import npydata

        tokens = np.arange(1 << 20, dtype=np.uint16)
        state = {"weights": torch.zeros(1 << 24)}
        with npydata.AsyncCheckpointer() as checkpointer:
            for count, (x, y) in enumerate(DataLoader(Windows(tokens), batch_size=8)):
                step(0.005)
                if count % 20 == 19:
                    checkpointer.save(f"run/step-{count}", state)
                    checkpointer.wait()
    """, "train.py"),
    "healthy, with accumulation": SickRun("", """
        tokens = np.arange(1 << 21, dtype=np.uint16)
        for count, (x, y) in enumerate(DataLoader(Windows(tokens), batch_size=8)):
            time.sleep(0.02)
            model(torch.ones(4, 64)).square().mean().backward()
            if count % 4 == 3:
                optimizer.step()
                optimizer.zero_grad()
    """),
    "healthy, of an iterable": SickRun("", """
        class Texts(torch.utils.data.IterableDataset):
            def __iter__(self):
                for _ in range(3000):
                    yield torch.arange(1024)

        for x in DataLoader(Texts(), batch_size=16, num_workers=1):
            step(0.02)
    """),
    "healthy, saves in a thread": SickRun("", """
        from threading import Thread

        tokens = np.arange(1 << 20, dtype=np.uint16)
        state, saving = {"weights": torch.zeros(1 << 22)}, Thread()
        saving.start()
        for count, (x, y) in enumerate(DataLoader(Windows(tokens), batch_size=8)):
            step(0.02)
            if count % 40 == 39:
                saving.join()
                saving = Thread(target=write_whole, args=(f"step-{count}.pt", state))
                saving.start()
    """),
    "healthy and short": SickRun("", """
        tokens = np.arange(1 << 17, dtype=np.uint16)
        for x, y in DataLoader(Windows(tokens), batch_size=8, num_workers=2):
            step(0.02)
    """),
    "epochs": SickRun("epoch_starts", """
        tokens = np.arange(1 << 16, dtype=np.uint16)
        loader = DataLoader(Windows(tokens), batch_size=16, num_workers=2)
        for epoch in range(12):
            for x, y in loader:
                step()
    """),
}  # fmt: skip
