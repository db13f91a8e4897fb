"""What the commit of lesson 08 promises, tested on the learner's own, and cards that break it."""

from pathlib import Path
from tempfile import TemporaryDirectory

from course.exercises import nb08
from course.lab import Card
from course.play.nb08 import commit_loads, commit_save, make_root
from course.play.power import ends, left_by_kills, left_by_power_cuts, loads


def expect(found, expected, what):
    assert found == expected, f"{what}: {found}, expected {expected}"


def only_whole(found):
    for call, what in found.items():
        assert not {"nothing", "damaged"} & set(what.split(" or ")), f"after {call.strip()}: {what}"


def saves(mine):
    return commit_save(mine.commit, 20), commit_save(mine.commit, 10)


def a_kill_leaves_a_whole_one(mine):
    """Whatever call a kill comes after, the old checkpoint loads or the new one, whole"""
    left = left_by_kills(*saves(mine))
    only_whole({call: loads(files, commit_loads(mine.latest_in)) for call, files in left.items()})


def a_power_cut_leaves_a_whole_one(mine):
    """Whatever call the power fails after, the old checkpoint loads or the new one, whole"""
    only_whole(ends(left_by_power_cuts(*saves(mine)), commit_loads(mine.latest_in)))


def returned_means_durable(mine):
    """When the commit has returned, the new checkpoint loads, whatever happens"""
    found = ends(left_by_power_cuts(*saves(mine)), commit_loads(mine.latest_in))
    expect(found["   (returned)"], "step 20", "after the return")


def names_in(root):
    return sorted(path.name for path in root.iterdir() if path.is_dir())


def latest_hides_nothing(mine):
    """A file `latest` that is lost, wrong or names half a checkpoint hides no other one"""
    for latest in (None, "no such folder", "b", ""):
        with TemporaryDirectory() as folder:
            make_root(Path(folder), "a b!", latest)
            found = mine.latest_in(Path(folder))
            assert found is not None, f"`latest` holds {latest!r}: nothing loads, expected a"
            expect(found.name, "a", f"`latest` holds {latest!r}: loads")


def a_person_may_go_back(mine):
    """A person may write an older name into `latest`, and that one loads"""
    with TemporaryDirectory() as folder:
        make_root(Path(folder), "a b", "a\n")
        expect(mine.latest_in(Path(folder)).name, "a", "loads")


def retention_counts_what_is_whole(mine):
    """`keep_last` counts complete checkpoints only, and removes no other"""
    with TemporaryDirectory() as folder:
        root = Path(folder)
        make_root(root, "a b c! d")
        mine.remove_old(root, 2, root / "d")
        expect(names_in(root), ["b", "c", "d"], "a, b, c (damaged), d with keep_last=2: left")


PROMISES = [
    a_kill_leaves_a_whole_one,
    a_power_cut_leaves_a_whole_one,
    returned_means_durable,
    latest_hides_nothing,
    a_person_may_go_back,
    retention_counts_what_is_whole,
]

CARDS = {
    "no sync before the name": Card(
        nb08.COMMIT,
        "sync_folder(temporary) >> pass",
        a_power_cut_leaves_a_whole_one,
        {
            "Nothing in any test with kills. After a power cut a checkpoint lacks files.": "",
            "A save that is killed half-way leaves half a checkpoint under its final name.": (
                "The final name comes with the rename, when all files are there for programs."
            ),
            "Saves become slower.": "They become faster: a sync is what takes its time.",
        },
    ),
    "latest is an order": Card(
        nb08.LATEST_IN,
        "named is not None and is_complete(named) >> named is not None",
        latest_hides_nothing,
        {
            "One damaged checkpoint stops the restart, although whole ones lie beside it.": "",
            "The run starts from an older step than it could.": (
                "It starts from the one that `latest` names, or not at all."
            ),
            "The newest checkpoint is removed by the next save.": (
                "What goes is decided by `remove_old`, which doesn't look at `latest`."
            ),
        },
    ),
    "anything counts": Card(
        nb08.REMOVE_OLD,
        "if is_complete(folder)] >> ]",
        retention_counts_what_is_whole,
        {
            "A damaged checkpoint stays, and a good one is removed in its place.": "",
            "The disk fills up.": "No more of them stay than before.",
            "The newest one is removed.": "`newest` is never removed, whatever counts.",
        },
    ),
}
