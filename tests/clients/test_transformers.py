"""The HF Trainer, interrupted in mid-epoch and resumed: batches, losses and weights to the bit."""

import pytest
import torch

from npydata import (
    AsyncDataLoader,
    CheckpointError,
    MmapDataset,
    NpyTokensDataset,
    latest_checkpoint,
)

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from clients.tools import NAMES, SEQ_LEN, VOCABULARY, WINDOWS, Interrupted, same_bits, tokens  # noqa

from npydata.integrations.transformers import SaveCheckpoints, train_dataloader  # noqa: E402

__all__ = ["tokens"]
EPOCHS = 2


def gpt2():
    torch.manual_seed(7)
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=VOCABULARY,
            n_positions=SEQ_LEN,
            n_embd=16,
            n_layer=1,
            n_head=2,
            bos_token_id=0,
            eos_token_id=0,
        )
    )


class Watch(transformers.TrainerCallback):
    """Notes each loss that is logged, and ends the run after a step: between epochs, in order."""

    def __init__(self, stop_at=None):
        self.stop_at, self.losses = stop_at, {}

    def on_log(self, args, state, control, logs=None, **_):
        if "loss" in logs:
            self.losses[state.global_step] = logs["loss"]

    def on_step_end(self, args, state, control, **_):
        if state.global_step == self.stop_at:
            if state.epoch % 1:
                raise Interrupted
            control.should_training_stop = True


class Trainer(transformers.Trainer):
    """Gives the loader that it was made with, if there is one, and notes what the model gets."""

    def __init__(self, *args, loader=None, **kwargs):
        super().__init__(*args, **kwargs)
        self.given_loader, self.seen = loader, []

    def get_train_dataloader(self):
        if self.given_loader is None:
            return super().get_train_dataloader()
        return train_dataloader(self, self.given_loader)

    def compute_loss(self, model, inputs, *args, **kwargs):
        assert torch.equal(inputs["input_ids"], inputs["labels"])
        if model.training:
            self.seen.append(inputs["input_ids"].tolist())
        return super().compute_loss(model, inputs, *args, **kwargs)


def trainer(folder, dataset, loader=None, stop_at=None, callbacks=(), **options):
    arguments = {"max_grad_norm": 1.0, "save_steps": 3, **options}
    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        num_train_epochs=EPOCHS,
        per_device_train_batch_size=4,
        seed=5,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        logging_steps=1,
        learning_rate=0.01,
        **arguments,
    )
    watch = Watch(stop_at)
    made = Trainer(
        gpt2(),
        arguments,
        train_dataset=dataset,
        eval_dataset=loader and loader.dataset,
        callbacks=[watch, *callbacks],
        loader=loader,
    )
    return made, watch


def sequential(path):
    return MmapDataset(path, SEQ_LEN, stride=SEQ_LEN, as_dict=NAMES)


def random_windows(path):
    made = NpyTokensDataset(path, SEQ_LEN, as_dict=NAMES)
    made._len = WINDOWS  # an epoch as short as the other's
    return made


WAYS = {
    "the dataset as it is": lambda path: (sequential(path), None),
    "the loader": lambda path: (None, AsyncDataLoader(sequential(path), 4, shuffle=True, seed=9)),
    "the loader without workers": lambda path: (
        None, AsyncDataLoader(sequential(path), 4, shuffle=True, seed=9, num_workers=0)),
    "the loader with random windows": lambda path: (
        None, AsyncDataLoader(random_windows(path), 4, seed=9, shuffle=False)),
    "the loader with transforms": lambda path: (
        None, AsyncDataLoader(sequential(path), 4, shuffle=True, seed=9, transforms=[dict])),
}  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("stop_at, save_steps, accumulate", [(5, 3, 1), (7, 6, 2), (11, 10, 1)],
                         ids=["first epoch", "second epoch", "between"])  # fmt: skip
def test_a_run_resumed_by_the_trainer_is_the_uninterrupted_one(
    tokens, tmp_path, way, stop_at, save_steps, accumulate
):
    options = {"gradient_accumulation_steps": accumulate, "save_steps": save_steps}
    whole, every = trainer(tmp_path / "whole", *WAYS[way](tokens), **options)
    whole.train()
    first, _ = trainer(tmp_path / "run", *WAYS[way](tokens), stop_at=stop_at, **options)
    with pytest.raises(Interrupted):
        first.train()
    second, after = trainer(tmp_path / "run", *WAYS[way](tokens), **options)
    second.train(resume_from_checkpoint=True)
    begin = save_steps
    assert second.seen == whole.seen[len(whole.seen) - len(second.seen) :]
    assert first.seen == whole.seen[: len(first.seen)]
    assert after.losses == {k: loss for k, loss in every.losses.items() if k > begin}
    assert len(after.losses) == len(every.losses) - begin > 0
    assert same_bits(second.model.state_dict(), whole.model.state_dict())


EVALUATED = {"eval_strategy": "steps", "eval_steps": 5}


@pytest.mark.parametrize(
    "stop_at, every, options",
    [(7, 5, {}), (14, 4, {}), (12, 10, {}), (10, 5, {}), (7, 5, EVALUATED)],
    ids=["first epoch", "second epoch", "between", "ended", "evaluated"],
)
def test_a_run_resumed_with_the_callback_is_the_uninterrupted_one(
    tokens, tmp_path, stop_at, every, options
):
    def run(folder, loader, stop_at=None):
        save = SaveCheckpoints(tmp_path / folder, every_n_steps=every, keep_last=2)
        made = trainer(
            tmp_path / "unused", None, loader, stop_at, [save], save_strategy="no", **options
        )
        found = save.latest()
        try:
            made[0].train(resume_from_checkpoint=found)
        except Interrupted:
            save.checkpointer.wait()
        return made

    whole, every_loss = run("whole", AsyncDataLoader(sequential(tokens), 4, shuffle=True, seed=9))
    run("run", AsyncDataLoader(sequential(tokens), 4, shuffle=True, seed=9), stop_at)
    torch.manual_seed(99)
    second, after = run("run", AsyncDataLoader(sequential(tokens), 4, shuffle=True, seed=9))
    begin = stop_at // every * every
    assert second.seen == whole.seen[begin:]
    assert after.losses == {k: loss for k, loss in every_loss.losses.items() if k > begin}
    assert same_bits(second.model.state_dict(), whole.model.state_dict())
    assert not (tmp_path / "unused").exists() or not any((tmp_path / "unused").iterdir())

    newest = latest_checkpoint(tmp_path / "run")
    second.model.config.save_pretrained(tmp_path / "copy")
    (tmp_path / "copy" / "model.safetensors").symlink_to(newest / "model.safetensors")
    opened = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "copy")
    assert newest.name == "step-000020"
    assert same_bits(opened.state_dict(), whole.model.state_dict())


class Stream(torch.utils.data.IterableDataset):
    def __init__(self, dataset):
        self.dataset = dataset

    def __iter__(self):
        return iter(self.dataset)


def test_a_longer_run_over_a_stream_goes_on_where_the_shorter_one_ended(tokens, tmp_path):
    def run(folder, steps):
        save = SaveCheckpoints(tmp_path / folder, every_n_steps=9)
        made, _ = trainer(
            tmp_path / "unused",
            Stream(sequential(tokens)),
            callbacks=[save],
            save_strategy="no",
            max_steps=steps,
            lr_scheduler_type="constant",
        )
        made.train(resume_from_checkpoint=save.latest())
        return made.model.state_dict()

    run("run", 4)
    assert same_bits(run("run", 7), run("whole", 7))


def test_what_the_callback_cannot_resume_from_is_refused(tmp_path):
    save = SaveCheckpoints(tmp_path / "run", every_n_steps=1)
    assert save.latest() is None
    save.checkpointer.save(tmp_path / "run" / "a", {"w": torch.ones(2)})
    with pytest.raises(CheckpointError, match="no state of the Trainer"):
        save.latest()
    with pytest.raises(CheckpointError, match="every_n_steps=0"):
        SaveCheckpoints(tmp_path, every_n_steps=0)
