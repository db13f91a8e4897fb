"""What lesson 09 promises, kept by the modules."""

import itertools
import random
import subprocess

import numpy as np
import pytest
import torch.distributed as dist
from tutorial import ranks

import npydata
from npydata.checkpointer.commit import temporary_beside
from npydata.checkpointer.load import check, hold_checkpoint
from npydata.checkpointer.manifest import checksums
from npydata.distributed.coordinator import Coordinator
from npydata.distributed.group import Group
from npydata.distributed.save_plan import Shard

pytestmark = pytest.mark.notebook_09


def boxes(shape, cuts):
    """Cut a shape into parts; `cuts` has the places for each dimension."""
    spans = [
        list(itertools.pairwise([0, *places, size]))
        for places, size in zip(cuts, shape, strict=True)
    ]
    for parts in itertools.product(*spans):
        yield tuple(a for a, _ in parts), tuple(b - a for a, b in parts)


def from_parts(taught, whole, index, cuts):
    """Put together `whole[index]` from parts, as a reader does."""
    chosen = taught.chosen_of(whole.shape, index)
    out = np.full([count for _, count, _ in chosen], -1)
    for offsets, sizes in boxes(whole.shape, cuts):
        part = whole[tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))]
        if (both := taught.overlap(chosen, (offsets, sizes))) is not None:
            there, here = both
            assert part[here].size, "a part that is not needed is not read"
            assert (out[there] == -1).all(), "no element comes twice"
            out[there] = part[here]
    return out


def a_shard(name, offset, size, whole, kind):
    return Shard(name, (offset,), (size,), (whole,), "torch.float32", kind)


def sharded(ranks, rows):
    """Two sharded tensors and five that every rank has, as shards of each rank."""
    every = []
    for rank in range(ranks):
        each = -(-rows // ranks)
        begin = min(rank * each, rows)
        size = min(each, rows - begin)
        shards = [a_shard(name, begin, size, rows, "SHARD") for name in ("up", "down") if size]
        every.append(shards + [a_shard(f"copy{k}", 0, 9, 9, "TENSOR") for k in range(5)])
    return every


def two_ranks(timeout_s=0.05):
    """Two ranks of one process: their ends of one exchange."""
    store = dist.HashStore()
    return [Coordinator(Group(store, rank, 2, timeout_s, store), "a save") for rank in (0, 1)]


def written(taught, temporary, rank, content=b"a shard"):
    """Write a rank's files; return the message in which it says so."""
    (temporary / "model").mkdir(exist_ok=True)
    names = [f"model/rank_{rank}.safetensors", *["training_state.json"] * (rank == 0)]
    for name in names:
        (temporary / name).write_bytes(content)
    files = {name: [len(content), list(checksums(content))] for name in names}
    return {"files": files, "replicas": []}


@pytest.mark.promise
class TestPromises:
    def test_a_slice_of_parts_is_the_slice_of_the_whole(self, taught):
        whole = np.arange(11)
        for begin, end, step in itertools.product(range(12), range(12), (1, 2, 3, 5)):
            for cut in ([], [4], [3, 4, 9]):
                index = slice(begin, end, step)
                assert (from_parts(taught, whole, index, [cut]) == whole[index]).all()

    def test_so_it_is_in_several_dimensions_and_with_integers(self, taught):
        chance, whole = random.Random(0), np.arange(6 * 5 * 7).reshape(6, 5, 7)
        cuts = [[2, 3], [4], [1, 5]]
        for _ in range(200):
            index = tuple(
                slice(chance.randrange(n), chance.randrange(n + 1), chance.choice([1, 2, 3]))
                for n in whole.shape[: chance.randint(0, 3)]
            )
            assert (from_parts(taught, whole, index, cuts) == whole[index]).all()
        assert from_parts(taught, whole, (3, slice(1, 3), 6), cuts).ravel().tolist() == (
            whole[3, 1:3, 6].tolist()
        )

    @pytest.mark.parametrize("ranks, rows", [(1, 10), (2, 10), (3, 10), (4, 3)])
    def test_each_part_is_written_once_by_a_rank_that_has_it(self, taught, ranks, rows):
        every = sharded(ranks, rows)
        shares = [
            [every[rank][k] for k in chosen]
            for rank, chosen in enumerate(taught.dedup_save_plans(every))
        ]
        found = [shard for share in shares for shard in share]
        assert len(found) == len(set(found))
        assert set(found) == {shard for shards in every for shard in shards}

    def test_what_all_have_is_not_all_written_by_one(self, taught):
        copies = [
            sum(every[k].item_type == "TENSOR" for k in chosen)
            for every, chosen in zip(
                sharded(3, 9), taught.dedup_save_plans(sharded(3, 9)), strict=True
            )
        ]
        assert sorted(copies) == [1, 2, 2]

    def test_a_missing_rank_is_named_and_nothing_is_committed(self, taught, tmp_path):
        zero, _ = two_ranks()
        with temporary_beside(tmp_path / "step-1") as temporary:
            zero.send("done", written(taught, temporary, 0))
            commit = taught.GlobalCommit(1, None)
            with pytest.raises(npydata.CheckpointError, match="rank 1: no message"):
                commit(tmp_path / "step-1", temporary, zero)
        assert npydata.latest_checkpoint(tmp_path) is None
        assert not (tmp_path / "step-1").exists()

    def test_with_every_share_on_the_disk_it_is_committed(self, taught, tmp_path):
        zero, one = two_ranks(timeout_s=30)
        with temporary_beside(tmp_path / "step-1") as temporary:
            one.send("done", written(taught, temporary, 1))
            zero.send("done", written(taught, temporary, 0))
            taught.GlobalCommit(7, None)(tmp_path / "step-1", temporary, zero)
        newest = npydata.latest_checkpoint(tmp_path)
        assert newest == tmp_path / "step-1"
        manifest = check(hold_checkpoint(newest), content=True)
        assert manifest.step == 7
        assert set(manifest.files) == {
            "model/rank_0.safetensors",
            "model/rank_1.safetensors",
            "training_state.json",
        }

    def test_what_a_rank_forbade_is_not_committed(self, taught, tmp_path):
        zero, one = two_ranks(timeout_s=30)
        with temporary_beside(tmp_path / "step-1") as temporary:
            one.send("done", written(taught, temporary, 1))
            zero.send("done", written(taught, temporary, 0))
            assert one.withdraw()
            with pytest.raises(npydata.CheckpointError, match="waited too long for rank 0"):
                taught.GlobalCommit(7, None)(tmp_path / "step-1", temporary, zero)
        assert npydata.latest_checkpoint(tmp_path) is None

    @pytest.mark.parametrize("left", [None, b"a sh"], ids=["missing", "shorter"])
    def test_a_file_that_rank_0_does_not_see_is_not_committed(self, taught, tmp_path, left):
        zero, one = two_ranks(timeout_s=30)
        with temporary_beside(tmp_path / "step-1") as temporary:
            one.send("done", written(taught, temporary, 1))
            zero.send("done", written(taught, temporary, 0))
            path = temporary / "model/rank_1.safetensors"
            path.unlink() if left is None else path.write_bytes(left)
            with pytest.raises(npydata.CheckpointError, match="a file system that all of them"):
                taught.gather_entries(temporary, zero)

    def test_the_error_of_a_rank_that_aborts_arrives(self, taught, tmp_path):
        zero, one = two_ranks(timeout_s=30)
        zero.send("done", {"files": {}, "replicas": []})
        with pytest.raises(OSError, match="No space"), one.abort_on_error("done"):
            raise OSError(28, "No space left on device")
        with pytest.raises(npydata.CheckpointError, match=r"rank 1: .*No space left"):
            taught.gather_entries(tmp_path, zero)


def test_ranks_that_a_notebook_starts_end_with_their_time_out(monkeypatch):
    started, popen = [], subprocess.Popen

    def note(*args, **options):
        started.append(popen(*args, **options))
        return started[-1]

    monkeypatch.setattr(subprocess, "Popen", note)
    with pytest.raises(subprocess.TimeoutExpired):
        ranks.start(2, "hello", patience=0.1)
    assert [process.poll() for process in started] == [-9]


def test_a_rank_that_fails_is_reported_to_the_notebook(tmp_path):
    (tmp_path / "latest").mkdir()  # where a file should be
    (tmp_path / "step-4").write_text("and a file where a checkpoint should go")
    with pytest.raises(RuntimeError, match="step-4"):
        ranks.start(1, "train", tmp_path, 4, 4)
