"""``npydata verify`` over what the frameworks' own savers leave: complete, or killed in a save."""

import random
import shutil
import threading
from itertools import count

import pytest
import torch
from checkpoint_tools import refuse_pickles
from faults.children import Child
from safetensors.torch import load_file
from torch.distributed import checkpoint as dcp

from npydata.checkpointer.scan import scan

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(600)]
KILLS = 20


def model():
    return torch.nn.Sequential(torch.nn.Linear(500, 1000), torch.nn.Linear(1000, 500))


def trained():
    """Return a model and an optimizer that has its state."""
    made = model()
    optimizer = torch.optim.AdamW(made.parameters())
    made(torch.ones(2, 500)).sum().backward()
    optimizer.step()
    return made, optimizer


def with_transformers(root, saved):
    transformers = pytest.importorskip("transformers")
    # Its bars share a lock between processes: one that was killed may have kept it.
    transformers.utils.logging.disable_progress_bar()

    class Saved(transformers.TrainerCallback):
        def on_save(self, args, state, control, **_):
            saved(state.global_step)

    config = transformers.GPT2Config(vocab_size=64, n_embd=256, n_layer=2, n_head=2)
    arguments = transformers.TrainingArguments(
        output_dir=str(root),
        max_steps=10**6,
        per_device_train_batch_size=1,
        save_steps=1,
        use_cpu=True,
        disable_tqdm=True,
    )
    ids = [{"input_ids": torch.arange(8), "labels": torch.arange(8)}] * 100
    gpt2 = transformers.GPT2LMHeadModel(config)
    transformers.Trainer(gpt2, arguments, train_dataset=ids, callbacks=[Saved()]).train()


def with_accelerate(root, saved):
    accelerate = pytest.importorskip("accelerate")
    options = {"project_dir": str(root), "automatic_checkpoint_naming": True}
    project = accelerate.utils.ProjectConfiguration(**options)
    accelerator = accelerate.Accelerator(cpu=True, project_config=project)
    accelerator.prepare(*trained())
    for step in count():
        accelerator.save_state()
        saved(step)


def with_lightning(root, saved):
    lightning = pytest.importorskip("lightning").pytorch

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = model()

        def training_step(self, batch, index):
            return self.model(batch).square().mean()

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters())

    class Save(lightning.Callback):
        def on_train_batch_end(self, trainer, *_):
            trainer.save_checkpoint(root / f"step={trainer.global_step}.ckpt")
            saved(trainer.global_step)

    root.mkdir(exist_ok=True)
    options = {"enable_progress_bar": False, "enable_model_summary": False}
    trainer = lightning.Trainer(
        accelerator="cpu",
        max_epochs=-1,
        logger=False,
        enable_checkpointing=False,
        callbacks=[Save()],
        default_root_dir=root,
        **options,
    )
    trainer.fit(Module(), torch.utils.data.DataLoader(torch.ones(100, 500)))


def with_dcp(root, saved):
    made, optimizer = trained()
    for step in count():
        state = {"model": made.state_dict(), "optimizer": optimizer.state_dict()}
        dcp.save(state, checkpoint_id=root / f"step_{step}")
        saved(step)


WRITERS = [with_transformers, with_accelerate, with_lightning, with_dcp]


def killed(write, root, delay):
    """Save in a child, killed so many seconds after two saves; return the last confirmed step."""
    child = Child(lambda report: write(root, report))
    lines = [child.line() for _ in range(2)]
    assert None not in lines, "the framework failed"
    threading.Event().wait(delay)
    child.kill()
    lines += child.lines()
    child.close()
    return int(lines[-1])


def complete(root, monkeypatch):
    """Return the newest checkpoint that ``verify`` calls complete, and how many it does not."""
    with monkeypatch.context() as patch:
        refuse_pickles(patch)
        found = scan(root)
    return next((one for one in found if one.complete), None), [o for o in found if not o.complete]


def require_whole(path):
    """Load everything of a checkpoint, as its framework does."""
    files = [path] if path.is_file() else [one for one in path.rglob("*") if one.is_file()]
    for file in files:
        if file.suffix == ".safetensors":
            load_file(file)
        elif file.suffix in (".pt", ".pth", ".bin", ".ckpt", ".pkl"):
            torch.load(file, weights_only=False)
    if (path / ".metadata").exists():
        there = model().state_dict()
        dcp.load({"model": there}, checkpoint_id=path, no_dist=True)


@pytest.mark.parametrize("write", WRITERS, ids=lambda one: one.__name__)
def test_killed_in_a_save_the_newest_complete_one_is_named(write, tmp_path, monkeypatch):
    chance, cut_off = random.Random(1), 0
    for number in range(KILLS):
        root = tmp_path / str(number)
        confirmed = killed(write, root, chance.random() * 0.1)
        newest, others = complete(root, monkeypatch)
        assert newest is not None, [one.why for one in others]
        assert newest.step >= confirmed, (newest, others)
        require_whole(newest.path)
        cut_off += bool(others)
        shutil.rmtree(root)
    if write is not with_lightning:  # which renames a temporary file
        assert cut_off, "no kill came within a save: they prove nothing"
