"""What the commit of lesson 08 promises, tested on the learner's own, and cards that break it."""

from course.exercises import nb08
from course.lab import Card
from course.play.nb08 import film, saver_of
from course.promises import expect


def a_crash_leaves_a_whole_one(mine):
    """Whichever call a crash follows, a whole checkpoint loads, and in the end the new one"""
    kills, cuts = film(*saver_of(mine.commit, mine.latest_in))
    for what, found in (("killed", kills), ("power cut", cuts)):
        bad = {
            call.strip(): loads
            for call, loads in found.items()
            if {"nothing", "damaged"} & set(loads.split())
        }
        expect(bad, {}, f"{what}, without a whole checkpoint")
    expect(cuts["   (returned)"], "step 20", "a power cut after the return")


CARDS = {
    "no sync before the name": Card(
        nb08.COMMIT,
        "sync_folder(temporary) >> pass",
        a_crash_leaves_a_whole_one,
        {
            "Nothing in any test with kills. After a power cut a checkpoint lacks files.": "",
            "A save that is killed half-way leaves half a checkpoint under its final name.": (
                "The rename gives the final name, and by then programs see all files."
            ),
            "Saves become slower.": "They become faster: a sync is what takes its time.",
        },
    ),
}
