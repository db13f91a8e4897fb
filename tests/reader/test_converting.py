"""What is written as safetensors reads as what it was made of; and what inspect says of both."""

import pytest
import torch
from children import run_child
from hypothesis import given
from safetensors.torch import load_file
from state_strategies import quickly, resolved, seen, states

from npydata import CheckpointError, open_checkpoint
from npydata.cli import main
from npydata.reader.inspect import as_table, inspect_checkpoint


@quickly
@given(state=states())
def test_a_converted_checkpoint_reads_as_its_source(tmp_path_factory, state):
    folder = tmp_path_factory.mktemp("convert")
    torch.save(state, folder / "a.pt")
    with open_checkpoint(folder / "a.pt") as source:
        done = source.to_safetensors(folder / "a.safetensors")
        with open_checkpoint(folder / "a.safetensors") as made:
            assert set(made) == set(source)
            assert (
                made.ties().keys() | made.ties().values()
                == source.ties().keys() | source.ties().values()
            )
            for name in source:
                one, other = (seen(resolved(it[name]), strides=False) for it in (made, source))
                assert one == other
            kept = {
                name: source.metadata[name] for name in source.metadata if name not in done.left_out
            }
            assert {name: made.metadata[name] for name in kept} == kept
        assert done.tensors == len(source)
        assert (folder / "a.safetensors").stat().st_size == done.nbytes
        source.to_safetensors(folder / "shards", shard_size=100)
        with open_checkpoint(folder / "shards") as shards:
            assert {name: seen(resolved(shards[name]), strides=False) for name in shards} == {
                name: seen(resolved(source[name]), strides=False) for name in source
            }
            assert {name: shards.metadata[name] for name in kept} == kept


def test_a_prefix_is_taken_off_and_its_ties_are_kept(tmp_path):
    weight = torch.randn(4, 4)
    torch.save(
        {"model": {"a": weight, "b": weight}, "optimizer": {"c": torch.ones(2)}, "step": 1},
        tmp_path / "a.pt",
    )
    paths = [str(tmp_path / name) for name in ("a.pt", "m.safetensors")]
    assert main(["convert", *paths, "--prefix", "model."]) == 0
    with open_checkpoint(tmp_path / "a.pt") as source:
        for prefix, hint in (("modle.", "no name begins with"), ("model", "did you mean 'model.'")):
            with pytest.raises(CheckpointError, match=f"a.pt: .*{hint}"):
                source.to_safetensors(tmp_path / "x.safetensors", prefix=prefix)
    with open_checkpoint(tmp_path / "m.safetensors") as made:
        assert made.ties() == {"b": "a"}
        assert torch.equal(made["b"], weight)
    assert torch.equal(load_file(tmp_path / "m.safetensors")["a"], weight)


@pytest.mark.parametrize(
    "name, options, error",
    [
        ("a.pt", {}, "ends in .pt"),
        ("shards", {"shard_size": 0}, "shard_size=0"),
        ("x.safetensors", {}, "expanded tensors"),
    ],
)
def test_what_cannot_be_written_leaves_nothing_behind(tmp_path, name, options, error):
    torch.save(
        {"w": torch.ones(1).expand(100_000) if error == "expanded tensors" else torch.ones(9)},
        tmp_path / "source.safetensors",
    )
    before = sorted(tmp_path.iterdir())
    source = open_checkpoint(tmp_path / "source.safetensors")
    with source, pytest.raises(CheckpointError, match=error):
        source.to_safetensors(tmp_path / name, **options)
    assert sorted(tmp_path.iterdir()) == before


def test_memory_stays_small_however_large_the_tensors_are(tmp_path):
    path = tmp_path / "a.pt"
    torch.save({"w": torch.ones(1 << 24), "t": torch.ones(1 << 12, 1 << 12).t()}, path)
    script = (
        "import sys; from checkpoint_reading import mebibytes\n"
        "from npydata import open_checkpoint\n"
        "c = open_checkpoint(sys.argv[1]); before = mebibytes('VmHWM')\n"
        "c.to_safetensors(sys.argv[1] + '.safetensors')\n"
        "print(mebibytes('VmHWM') - before)"
    )
    assert (
        float(run_child(script, path).stdout) < 140
    )  # the pages of the turned one, 64 MiB, are mapped
    with open_checkpoint(f"{path}.safetensors") as made:
        assert made["t"].sum() == 1 << 24


def test_a_report_counts_tensors_ties_and_values(tmp_path):
    weight = torch.randn(4, 4)
    torch.save(
        {"a": weight, "b": weight, "n": {"x": 1.5, "y": b"raw", "run": print}}, tmp_path / "a.pt"
    )
    report = inspect_checkpoint(tmp_path / "a.pt")
    counted = [report[one] for one in ("num_tensors", "num_ties", "parameters", "nbytes")]
    assert counted == [2, 1, 16, 64]
    assert report["metadata"] == {"n.x": 1.5, "n.y": {"$bytes": "cmF3"}}
    assert report["other"] == {"n.run": "n.run needs builtins.print"}
    assert report["tensors"][1]["same_as"] == "a"
    assert "values      3" in as_table(report)


def test_names_of_a_hostile_file_steer_no_terminal(tmp_path):
    torch.save({"\x1b[31mred\nline" * 50: torch.ones(1), "v": "\x1b]0;x\x07"}, tmp_path / "a.pt")
    table = [*as_table(inspect_checkpoint(tmp_path / "a.pt"))]
    assert not [line for line in table if "\x1b" in line or len(line) >= 400]
