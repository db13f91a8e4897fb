"""Loaders to be killed and resumed: those of others where they are installed, and ours.

``pip install torchdata grain litdata lightning``
"""

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from npydata import AsyncDataLoader
from npydata.bench.baselines import OURS, baseline
from npydata.bench.baselines.frameworks import installed
from npydata.bench.survival.resuming import SAMPLES, SEED, Resumer, Setting, Stream


class Numbers(Dataset[int]):
    """Samples that are their own index."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> int:
        if not 0 <= index < SAMPLES:
            raise IndexError(index)
        return int(index)


@baseline(
    "survival loaders",
    "DataLoader",
    "naive",
    settings={"begins again": {"skips": False}, "skips batches": {"skips": True}},
)
def stock(*, skips: bool) -> Resumer:
    """A seeded sampler; what was seen is skipped, or seen again."""

    def opened(setting: Setting, state: Any) -> Stream:
        from torch.utils.data import DistributedSampler

        sampler: Any = DistributedSampler(Numbers(), setting.world_size, setting.rank, seed=SEED)
        loader = DataLoader(Numbers(), setting.batch_size, sampler=sampler,
                            num_workers=setting.workers)  # fmt: skip
        taken = [state or 0]

        def batches() -> Iterator[list[int]]:
            for batch in islice(loader, taken[0] if skips else 0, None):
                taken[0] += 1
                yield batch.tolist()

        return Stream(batches(), lambda: taken[0])

    return opened


@baseline("survival loaders", "torchdata", "peer", settings={"StatefulDataLoader": {}},
          available=installed("torchdata"))  # fmt: skip
def torchdata() -> Resumer:
    from torchdata.stateful_dataloader import StatefulDataLoader
    from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

    def opened(setting: Setting, state: Any) -> Stream:
        sampler = StatefulDistributedSampler(Numbers(), setting.world_size, setting.rank, seed=SEED)
        loader = StatefulDataLoader(Numbers(), setting.batch_size, sampler=sampler,
                                    num_workers=setting.workers)  # fmt: skip
        if state is not None:
            loader.load_state_dict(state)
        return Stream((batch.tolist() for batch in loader), loader.state_dict)

    return opened


@baseline("survival loaders", "Grain", "peer", settings={"DataLoader": {}},
          available=installed("grain"))  # fmt: skip
def grain() -> Resumer:
    from absl import flags
    from grain import python as pygrain

    flags.FLAGS.mark_as_parsed()  # its worker processes ask for them

    def opened(setting: Setting, state: Any) -> Stream:
        shards = pygrain.ShardOptions(shard_index=setting.rank, shard_count=setting.world_size)
        sampler = pygrain.IndexSampler(SAMPLES, shard_options=shards, shuffle=True, num_epochs=1,
                                       seed=SEED)  # fmt: skip
        loader = pygrain.DataLoader(
            data_source=pygrain.RangeDataSource(0, SAMPLES, 1), sampler=sampler,
            worker_count=setting.workers, shard_options=shards,
            operations=[pygrain.Batch(setting.batch_size, drop_remainder=False)],
        )  # fmt: skip
        batches = iter(loader)
        if state is not None:
            batches.set_state(state)
        return Stream((batch.tolist() for batch in batches), batches.get_state)

    return opened


def one_number(index: int) -> int:
    return index


@baseline("survival loaders", "LitData", "peer", settings={"StreamingDataLoader": {}},
          available=installed("litdata"))  # fmt: skip
def litdata() -> Resumer:
    from litdata import StreamingDataLoader, StreamingDataset
    from litdata.streaming.writer import BinaryWriter

    def opened(setting: Setting, state: Any) -> Stream:
        if setting.world_size > 1:
            raise NotImplementedError("not tried: it takes ranks from a process group only")
        chunks = setting.folder / "chunks"
        if not (chunks / "index.json").exists():
            chunks.mkdir()
            writer = BinaryWriter(str(chunks), chunk_size=64)
            for number in range(SAMPLES):
                writer[number] = number
            writer.done()
            writer.merge(1)
        dataset = StreamingDataset(str(chunks), shuffle=True, seed=SEED)
        loader = StreamingDataLoader(dataset, batch_size=setting.batch_size,
                                     num_workers=setting.workers)  # fmt: skip
        if state is not None:
            loader.load_state_dict(state)
        return Stream((batch.tolist() for batch in loader), loader.state_dict)

    return opened


@baseline("survival loaders", "Lightning", "peer", settings={"fit(ckpt_path)": {}},
          available=installed("lightning"))  # fmt: skip
def lightning() -> Resumer:
    """A stock DataLoader; its trainer keeps how many batches it has seen."""
    from lightning import Callback, LightningModule, Trainer

    class Keep(Callback):
        def __init__(self, step: int, path: Path) -> None:
            self.step, self.path = step, path

        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            if trainer.global_step == self.step:
                trainer.save_checkpoint(self.path)

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(1))
            self.seen: list[list[int]] = []

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.0)

        def training_step(self, batch: Any, index: int) -> Any:
            self.seen.append(batch.tolist())
            return self.weight.sum()

    def opened(setting: Setting, state: Any) -> Stream:
        if setting.world_size > 1:
            raise NotImplementedError("not tried: it takes ranks from a process group only")
        order = torch.Generator().manual_seed(SEED)
        loader = DataLoader(Numbers(), setting.batch_size, num_workers=setting.workers,
                            shuffle=True, generator=order)  # fmt: skip
        checkpoint = setting.folder / "resumed.ckpt"
        if state is not None:
            checkpoint.write_bytes(state)

        def fit(*callbacks: Any) -> Any:
            module = Module()
            trainer = Trainer(max_epochs=1, accelerator="cpu", logger=False,
                              enable_checkpointing=False, enable_progress_bar=False,
                              enable_model_summary=False, callbacks=list(callbacks))  # fmt: skip
            trainer.fit(module, loader, ckpt_path=str(checkpoint) if state is not None else None)
            return module

        taken = [0]

        def batches() -> Iterator[list[int]]:
            for batch in fit().seen:
                taken[0] += 1
                yield batch

        def kept() -> bytes:
            path = setting.folder / "kept.ckpt"
            order.manual_seed(SEED)
            fit(Keep(taken[0], path))
            return path.read_bytes()

        return Stream(batches(), kept)

    return opened


@baseline("survival loaders", OURS, "ours", settings={"AsyncDataLoader": {}})
def ours() -> Resumer:
    def opened(setting: Setting, state: Any) -> Stream:
        loader = AsyncDataLoader(
            Numbers(), batch_size=setting.batch_size, num_workers=setting.workers, seed=SEED,
            rank=setting.rank, world_size=setting.world_size,
        )  # fmt: skip
        if state is not None:
            loader.load_state_dict(state)
        return Stream((batch.tolist() for batch in loader), loader.state_dict)

    return opened
