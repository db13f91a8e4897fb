"""What the commit of lesson 08 promises, tested on the learner's own, and cards that break it."""

from course.exercises import nb08
from course.lab import Card
from course.play.nb08 import film, saver_of
from course.promises import expect


def only_whole(found):
    bad = {call.strip(): what for call, what in found.items()
           if {"nothing", "damaged"} & set(what.split())}  # fmt: skip
    expect(bad, {}, "without a whole checkpoint")


def a_kill_leaves_a_whole_one(mine):
    """Whatever call a kill comes after, the old checkpoint loads or the new one, whole"""
    only_whole(film(*saver_of(mine.commit, mine.latest_in))[0])


def a_power_cut_leaves_a_whole_one(mine):
    """Whatever call the power fails after, the old checkpoint loads or the new one, whole"""
    only_whole(film(*saver_of(mine.commit, mine.latest_in))[1])


def returned_means_durable(mine):
    """When the commit has returned, the new checkpoint loads, whatever happens"""
    _, found = film(*saver_of(mine.commit, mine.latest_in))
    expect(found["   (returned)"], "step 20", "after the return")


def latest_hides_nothing(mine):
    """A file `latest` that is lost, wrong or names half a checkpoint hides no other one"""
    for latest in (None, "no such folder", "b", ""):
        expect(nb08.latest_seen(mine.latest_in, "a b!", latest), "a", f"`latest` holds {latest!r}")


def retention_counts_what_is_whole(mine):
    """`keep_last` counts complete checkpoints only, and removes no other"""
    left = nb08.removed_seen(mine.remove_old, "a b c! d", 2, "d")["left"]
    expect(left, "b, c, d", "a, b, c (damaged), d with keep_last=2: left")


CARDS = {
    "no sync before the name": Card(
        nb08.COMMIT,
        "sync_folder(temporary) >> pass",
        a_power_cut_leaves_a_whole_one,
        {
            "Nothing in any test with kills. After a power cut a checkpoint lacks files.": "",
            "A save that is killed half-way leaves half a checkpoint under its final name.": (
                "The rename gives the final name, and by then programs see all files."
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
