"""Lightning's Trainer with the loader and the checkpointer: killed, resumed, the same bits."""

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from npydata import (
    AsyncDataLoader,
    CheckpointError,
    MmapDataset,
    NpyTokensDataset,
    latest_checkpoint,
    open_checkpoint,
    verify_checkpoint,
)

lightning = pytest.importorskip("lightning")

from lightning.pytorch import LightningModule, Trainer  # noqa: E402
from lightning.pytorch.callbacks import Callback, ModelCheckpoint  # noqa: E402

from clients.tools import SEQ_LEN, WINDOWS, Interrupted, Tiny, same_bits, tokens  # noqa: E402
from npydata.integrations.lightning import AsyncCheckpointIO, SaveCheckpoints  # noqa: E402

__all__ = ["tokens"]
pytestmark = pytest.mark.filterwarnings("ignore")


class Module(LightningModule):
    def __init__(self, dropout=True):
        super().__init__()
        self.model, self.seen = Tiny(), []
        if not dropout:
            self.model.drop.p = 0.0

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)]

    def training_step(self, batch, index):
        loss = self.model(*batch)
        self.seen.append((batch[0].tolist(), loss.item()))
        return loss

    def validation_step(self, batch, index):
        self.model(*batch)


class Endless(IterableDataset):
    """A stream: nobody knows its length."""

    def __init__(self, dataset):
        self.dataset = dataset

    def __iter__(self):
        return map(self.dataset.__getitem__, range(WINDOWS))


class StopAt(Callback):
    def __init__(self, step):
        self.step = step

    def on_train_batch_start(self, trainer, *_):
        if trainer.global_step == self.step:
            raise Interrupted


def fit(path, callbacks=(), plugins=(), ckpt_path=None, epochs=2, module=None, **options):
    module = module or Module()
    if options.pop("random", False):
        dataset = NpyTokensDataset(path, SEQ_LEN)
        dataset._len = WINDOWS
        options["shuffle"] = False
    else:
        dataset = MmapDataset(path, SEQ_LEN, stride=SEQ_LEN)
    if options.pop("stream", False):
        dataset, options["shuffle"] = Endless(dataset), False
    validated = DataLoader(dataset, 4) if options.pop("validated", False) else None
    loader = AsyncDataLoader(dataset, 4, seed=9, **{"shuffle": True, **options})
    trainer = Trainer(
        max_epochs=epochs,
        accelerator="cpu",
        logger=False,
        callbacks=[*callbacks],
        plugins=[*plugins],
        enable_checkpointing=bool(callbacks),
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    try:
        trainer.fit(module, loader, validated, ckpt_path=ckpt_path)
    except Interrupted:
        trainer.strategy.checkpoint_io.teardown()
    return module


@pytest.mark.parametrize("stop, every", [(5, 3), (15, 7), (11, 10)],
                         ids=["first epoch", "second epoch", "between"])  # fmt: skip
@pytest.mark.parametrize("options", [{}, {"num_workers": 0}, {"random": True}, {"validated": True}])
def test_a_run_resumed_with_the_callback_is_the_uninterrupted_one(
    tokens, tmp_path, stop, every, options
):
    def callback(folder="run"):
        return SaveCheckpoints(tmp_path / folder, every_n_train_steps=every, keep_last=2)

    whole = fit(tokens, [callback("whole")], **options)
    first = fit(tokens, [callback(), StopAt(stop)], **options)
    assert first.seen == whole.seen[:stop]
    torch.manual_seed(99)
    again = callback()
    second = fit(tokens, [again], ckpt_path=again.latest(), **options)
    assert second.seen == whole.seen[stop // every * every :]
    assert same_bits(second.state_dict(), whole.state_dict())
    assert len([entry for entry in (tmp_path / "run").iterdir() if entry.is_dir()]) <= 2


def test_lightnings_own_callback_saves_and_resumes_through_the_plug_in(tokens, tmp_path):
    whole = fit(tokens, module=Module(dropout=False))
    for stop, ckpt_path in ((7, None), (None, str(tmp_path / "step=6.ckpt"))):
        own = ModelCheckpoint(
            tmp_path, "{step}", every_n_train_steps=2, save_top_k=2, monitor="step", mode="max"
        )
        callbacks = [own] if stop is None else [own, StopAt(stop)]
        module = Module(dropout=False)
        fit(tokens, callbacks, [AsyncCheckpointIO()], ckpt_path, module=module)
    assert module.seen == whole.seen[6:]
    assert same_bits(module.state_dict(), whole.state_dict())
    kept = sorted(entry.name for entry in tmp_path.iterdir() if entry.is_dir())
    resumed_from = "step=6.ckpt"  # Lightning never removes that
    assert kept == ["step=18.ckpt", "step=20.ckpt", resumed_from]
    assert latest_checkpoint(tmp_path).name == "step=20.ckpt"
    with open_checkpoint(tmp_path / "step=20.ckpt") as saved:
        assert any(name.endswith("model.head.weight") for name in saved)


def test_the_callback_saves_the_last_step_and_removes_only_its_own(tokens, tmp_path):
    own = ModelCheckpoint(tmp_path / "own", "{step}", every_n_train_steps=4, save_top_k=-1)
    fit(tokens, [own, SaveCheckpoints(tmp_path / "run", every_n_train_steps=3, keep_last=2)])
    kept = [[one.name for one in (tmp_path / name).glob("*[0-9]*")] for name in ("own", "run")]
    assert len(kept[0]) == 5
    assert sorted(kept[1]) == ["step-000018", "step-000020"]


def test_batches_of_several_optimizer_steps_pass_over_no_save(tokens, tmp_path):
    class Twice(Module):
        automatic_optimization = False

        def training_step(self, *args):
            loss = super().training_step(*args)
            self.manual_backward(loss)
            for _ in range(3):
                self.optimizers().step()

    fit(tokens, [SaveCheckpoints(tmp_path, every_n_train_steps=10)], epochs=1, module=Twice())
    assert {int(one.name[5:]) for one in tmp_path.glob("step-*")} == {12, 21, 30}


def test_a_save_that_overlaps_with_training_is_whole(tokens, tmp_path):
    save = SaveCheckpoints(tmp_path, every_n_train_steps=1, snapshot="overlap")
    fit(tokens, [save], epochs=1)
    assert verify_checkpoint(save.latest()).step == 10


def test_a_stream_too_is_saved_every_few_steps_and_at_its_end(tokens, tmp_path):
    fit(tokens, [SaveCheckpoints(tmp_path, every_n_train_steps=6)], epochs=1, stream=True)
    assert {one.name for one in tmp_path.glob("step-*")} == {"step-000006", "step-000010"}


def test_arguments_that_cannot_be_saved_are_refused_before_the_first_step(tokens, tmp_path):
    module = Module()
    module.save_hyperparameters({"net": torch.nn.Linear(1, 1)})
    with pytest.raises(CheckpointError, match=r"save_hyperparameters\(\) keeps \['net'\]: of type"):
        fit(tokens, [SaveCheckpoints(tmp_path, every_n_train_steps=6)], module=module)
    assert not module.seen


def test_what_the_plug_in_cannot_do_is_refused(tmp_path):
    io = AsyncCheckpointIO()
    with pytest.raises(CheckpointError, match="storage_options"):
        io.save_checkpoint({"state_dict": {}}, tmp_path / "a", storage_options={"x": 1})
    with pytest.raises(CheckpointError, match=r"\['hook'\]: of type object"):
        io.save_checkpoint({"state_dict": {}, "hook": object()}, tmp_path / "a")
    io.save_checkpoint({"state_dict": {"w": torch.ones(2)}}, tmp_path / "a")
    with pytest.raises(CheckpointError, match="no state of Lightning"):
        io.load_checkpoint(tmp_path / "a")
    with pytest.raises(CheckpointError, match="map_location"):
        io.load_checkpoint(tmp_path / "a", map_location={"cuda:0": "cpu"})
    with pytest.raises(CheckpointError, match="every_n_train_steps=0"):
        SaveCheckpoints(tmp_path, every_n_train_steps=0)
