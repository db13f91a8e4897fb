"""Wrong answers to the exercises of notebook 10, each with a phrase of the message it deserves."""

from math import ceil, isclose, sqrt


def compares_whole_columns(whole, resumed):
    def column(rows, name):
        return [row[name] for row in rows]

    for name, part in [("weights", "weights"), ("batch", "loader"), ("loss", "generators")]:
        if column(whole, name) != column(resumed, name):
            return part
    return "nothing"


def compares_the_first_rows(whole, resumed):
    for name, part in [("weights", "weights"), ("batch", "loader"), ("loss", "generators")]:
        if whole[0][name] != resumed[0][name]:
            return part
    return "nothing"


def looks_at_the_loss_first(whole, resumed):
    if whole[0]["loss"] != resumed[0]["loss"]:
        return "generators"
    if whole[0]["batch"] != resumed[0]["batch"]:
        return "loader"
    return "optimizer" if whole[1]["weights"] != resumed[1]["weights"] else "nothing"


def finds_close_good_enough(whole, resumed):
    if whole[0]["weights"] != resumed[0]["weights"]:
        return "weights"
    if whole[0]["batch"] != resumed[0]["batch"]:
        return "loader"
    if not isclose(whole[0]["loss"], resumed[0]["loss"], abs_tol=1e-5):
        return "generators"
    return "optimizer" if whole[1]["weights"] != resumed[1]["weights"] else "nothing"


def what_is_left_must_be_it(whole, resumed):
    for name, part in [("weights", "weights"), ("batch", "loader"), ("loss", "generators")]:
        if whole[0][name] != resumed[0][name]:
            return part
    return "optimizer"


def loses_all_of_it(step, stall, between_crashes):
    return max(1, round(sqrt(stall * between_crashes) / step))


def in_seconds(step, stall, between_crashes):
    return max(1, round(sqrt(2 * stall * between_crashes)))


def every_step(step, stall, between_crashes):
    return 1


def once_a_crash(step, stall, between_crashes):
    return ceil(between_crashes / step)


def may_be_zero(step, stall, between_crashes):
    return round(sqrt(2 * stall * between_crashes) / step)


def without_the_root(step, stall, between_crashes):
    return max(1, round(2 * stall * between_crashes / step))


WRONG = {
    "missing_part": [
        ("all that follows differs", compares_whole_columns),
        ("in what the step did", compares_the_first_rows),
        ("blame the generators", looks_at_the_loss_first),
        ("equal, not close", finds_close_good_enough),
        ("the two runs are the same", what_is_left_must_be_it),
    ],
    "best_interval": [
        ("half-way through", loses_all_of_it),
        ("return seconds", in_seconds),
        ("as if a save cost nothing", every_step),
        ("wait for the crash", once_a_crash),
        ("return 0 steps", may_be_zero),
        ("grows too fast", without_the_root),
    ],
}
