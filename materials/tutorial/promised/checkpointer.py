"""What the learner's commit must keep, and one-line changes that break it."""

from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace

from tutorial.crashes import ends, files_of, loaded
from tutorial.kept import CheckpointError
from tutorial.kept.checkpointer.commit import LATEST
from tutorial.kept.checkpointer.manifest import MODEL, FileEntry, read_manifest
from tutorial.mutation import Card
from tutorial.promised import expect


@contextmanager
def run_of(mine, *steps, keep_last=None):
    """A folder with checkpoints of these steps, saved in this order."""
    with TemporaryDirectory() as folder:
        root = Path(folder) / "run 0"
        root.mkdir()
        for step in steps:
            mine.save(root / f"step_{step}", step, files_of(step), keep_last)
        yield root


def names_in(root):
    return sorted(path.name for path in root.glob("step_*"))


def loads(step):
    """Whether it is the old checkpoint that loads, or the new one."""
    return step in (1, 2)


def a_kill_leaves_a_checkpoint(mine):
    """Whatever call a kill comes after, the old checkpoint loads or the new one, whole"""
    for call, step in ends(mine).items():
        expect(loads(step), True, f"killed after {call}: a checkpoint loads")


def a_power_cut_leaves_a_checkpoint(mine):
    """Whatever call the power fails after, the old checkpoint loads or the new one, whole"""
    for call, step in ends(mine, power=True).items():
        expect(loads(step), True, f"no power after {call}: a checkpoint loads")


def a_folder_is_synced_and_closed(mine):
    """Syncing a folder leaves no descriptor open"""
    open_files = Path("/proc/self/fd")
    with TemporaryDirectory() as folder:
        before = len(list(open_files.iterdir()))
        for _ in range(5):
            mine.sync_folder(Path(folder))
        expect(len(list(open_files.iterdir())) - before, 0, "descriptors left open")


def a_wrong_size_is_an_error(mine):
    """A file that is missing, cut off or too long is an error that names it"""
    manifest = SimpleNamespace(files={"a": FileEntry(5, ())})
    for content in (None, b"1234", b"123456"):
        with TemporaryDirectory() as folder:
            if content is not None:
                (Path(folder) / "a").write_bytes(content)
            try:
                mine.check_sizes(Path(folder), manifest)
            except CheckpointError as error:
                expect(f"{folder}/a" in str(error), True, "the message names the file")
            else:
                raise AssertionError(f"{content} was accepted, expected an error at 5 bytes")


def every_bit_is_covered(mine):
    """A bit that changed is found, in whatever piece it is"""
    for place in range(9):
        content = bytearray(9)
        content[place] = 1
        expect(mine.checksums(bytes(content), 4) == mine.checksums(bytes(9), 4), False,
               f"a change in byte {place} of 9 goes unseen")  # fmt: skip


def latest_is_advice(mine):
    """A file `latest` that is lost, wrong or names half a checkpoint hides no other one"""
    with run_of(mine, 1, 2) as root:
        for text in ("step_9", "", "../step_1", "step_2\n"):
            (root / LATEST).write_text(text)
            expect(newest_in(mine, root), 2, f"latest says {text!r}")
        (root / "step_2" / MODEL).write_bytes(b"half")
        expect(newest_in(mine, root), 1, "half of step 2")


def newest_in(mine, root):
    """The step that loads, or the error instead of one."""
    try:
        return loaded(mine, root)
    except (CheckpointError, OSError) as error:
        return type(error).__name__


def the_last_commit_is_the_newest(mine):
    """The newest checkpoint is the one committed last, whatever its step"""
    with run_of(mine, 5, 2) as root:
        (root / LATEST).unlink()
        expect(loaded(mine, root), 2, "step 5 was saved, then step 2")
    with run_of(mine, 1, 2, 3, keep_last=1) as root:
        mine.save(root / "step_1", 1, files_of(1))
        (root / LATEST).unlink()
        expect(loaded(mine, root), 1, "saved last, after older ones were removed")


def only_the_run_s_own_go(mine):
    """`keep_last` removes the oldest of this run, and nobody else's"""
    with run_of(mine, 1, 2, 3, keep_last=2) as root:
        expect(names_in(root), ["step_2", "step_3"], "kept of steps 1 to 3")
    with run_of(mine, 1) as root:
        other = root / "step_1"
        manifest = read_manifest(other)
        (other / "manifest.json").write_bytes(of_another_run(manifest))
        for step in (2, 3):
            mine.save(root / f"step_{step}", step, files_of(step), 1)
        expect(names_in(root), ["step_1", "step_3"], "step 1 is of another run; kept")


def of_another_run(manifest):
    """The same manifest, as another training run would have written it."""
    fields = {name: getattr(manifest, name) for name in manifest.__slots__}
    return type(manifest)(**fields | {"run": "another"}).to_json()


PROMISES = [
    a_kill_leaves_a_checkpoint,
    a_power_cut_leaves_a_checkpoint,
    a_folder_is_synced_and_closed,
    every_bit_is_covered,
    a_wrong_size_is_an_error,
    latest_is_advice,
    the_last_commit_is_the_newest,
    only_the_run_s_own_go,
]

CARDS = [
    Card(
        name="no sync before the name",
        symbol="tutorial.kept.checkpointer.commit.commit",
        line="sync_folder(temporary)",
        mutant="pass",
        promise=a_power_cut_leaves_a_checkpoint,
        symptoms=(
            "A save killed half-way leaves half a checkpoint under its final name.",
            "Saves become slower.",
            "Nothing in any test with kills. After a power cut a checkpoint lacks files.",
        ),
        right=3,
        reasons={
            1: "A kill loses nothing that was written, and the name still comes last.",
            2: "A sync waits for the disk: with one less, saves become quicker.",
        },
    ),
    Card(
        name="latest is an order",
        symbol="tutorial.kept.checkpointer.commit.latest_in",
        line="if folder in committed(root) and is_complete(folder):",
        mutant="if folder is not None:",
        promise=latest_is_advice,
        symptoms=(
            "One damaged checkpoint stops the restart, although whole ones lie beside it.",
            "The run starts from an older step than it could.",
            "The newest checkpoint is removed by the next save.",
        ),
        right=1,
        reasons={
            2: "A whole folder that `latest` names is chosen with the line and without it.",
            3: "This function chooses what is loaded; it removes nothing.",
        },
    ),
    Card(
        name="whose are they",
        symbol="tutorial.kept.checkpointer.commit.remove_old",
        line="for folder in committed(root, run_of=newest)[keep_last:]:",
        mutant="for folder in committed(root)[keep_last:]:",
        promise=only_the_run_s_own_go,
        symptoms=(
            "The disk fills up.",
            "A second run in the same folder deletes the first one's checkpoints.",
            "A restart loads the other run's weights.",
        ),
        right=2,
        reasons={
            1: "More is removed, not less: what the other run saved counts as well.",
            3: "This function removes; what is loaded is chosen elsewhere.",
        },
    ),
]
