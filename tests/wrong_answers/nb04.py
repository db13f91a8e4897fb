"""Wrong answers to the exercises of notebook 04, each with a phrase of the message it deserves."""

from itertools import pairwise


def no_overlap(step_s, fetch_s, workers, tokens):
    per_batch = step_s
    per_batch += fetch_s / workers
    return tokens / per_batch


def alone_and_in_turn(step_s, fetch_s, workers, tokens):
    return tokens / (step_s + fetch_s)


def workers_cost_time(step_s, fetch_s, workers, tokens):
    return min(tokens / step_s, tokens / (workers * fetch_s))


def one_worker_only(step_s, fetch_s, workers, tokens):
    return min(tokens / step_s, tokens / fetch_s)


def workers_do_everything(step_s, fetch_s, workers, tokens):
    slower = fetch_s if fetch_s > step_s else step_s
    return tokens / slower * workers


def forgets_the_step(step_s, fetch_s, workers, tokens):
    return workers * (tokens / fetch_s)


def the_quicker_side(step_s, fetch_s, workers, tokens):
    return max(tokens / step_s, workers * tokens / fetch_s)


def batches_a_second(step_s, fetch_s, workers, tokens):
    return min(1 / step_s, workers / fetch_s)


def shares(trips):
    """How much of their time worker and consumer stand still."""
    worker = consumer = 0.0
    for before, after in pairwise(trips):
        worker += after[0] - before[1]
        consumer += after[2] - before[3]
    return worker / (trips[-1][1] - trips[0][0]), consumer / (trips[-1][3] - trips[0][2])


def only_the_consumer(trips):
    return ["fed", "starved"][shares(trips)[1] > 0.1]


def only_the_worker(trips):
    return ["starved", "lock-step"][shares(trips)[0] > 0.1]


def names_swapped(trips):
    worker, consumer = shares(trips)
    if consumer > 0.1:
        return "starved" if worker > 0.1 else "lock-step"
    return "fed"


def ready_is_waste(trips):
    ready = sum(taken - made for _, made, taken, _ in trips)
    return "fed" if ready <= 0.1 * (trips[-1][3] - trips[0][2]) else "starved"


WRONG = {
    "tokens_per_s": [
        ("add step and fetch", no_overlap),
        ("one after the other", alone_and_in_turn),
        ("more workers take longer", workers_cost_time),
        ("leave out that workers share", one_worker_only),
        ("share the step as well", workers_do_everything),
        ("how fast batches can be made", forgets_the_step),
        ("the quicker side", the_quicker_side),
        ("count batches, not tokens", batches_a_second),
    ],
    "diagnose": [
        ("at the consumer only", only_the_consumer),
        ("at the worker only", only_the_worker),
        ("starved for lock-step", names_swapped),
        ("batches lie ready", ready_is_waste),
    ],
}
