"""Exercises of notebook 07: repair a torn save, lay out a file."""

import numpy as np

from tutorial.grading import Exercise

# repaired


class Training:
    """Weights that all hold the number of their step; every write gives training time for one."""

    def __init__(self, sizes, step):
        self.weights = [np.full(size, step) for size in sizes]
        self.memory = [np.zeros(size, self.weights[0].dtype) for size in sizes]
        self.ours = list(self.weights), list(self.memory)

    def write(self, array):
        weights, memory = self.ours
        kept = [name for name, held in (("the weights", weights), ("memory", memory))
                if any(np.shares_memory(array, one) for one in held)]  # fmt: skip
        told = f"step {array.flat[0]} from {(kept or ['a new array'])[0]}"
        for one in weights:
            one += 1
        return told


def training_cases(rng):
    drawn = [(rng.integers(1, 5, count).tolist(), int(rng.integers(2, 99))) for count in (2, 3, 4)]
    trainings = [Training(*case) for case in [([1, 1], 7), ([2, 3], 7), *drawn]]
    return [(one.weights, one.memory, one.write) for one in trainings]


def repair(weights, memory, write):
    for target, source in zip(memory, weights, strict=True):
        np.copyto(target, source)
    return [write(array) for array in memory]


def copy_in_turn(weights, memory, write):
    told = []
    for target, source in zip(memory, weights, strict=True):
        np.copyto(target, source)
        told.append(write(target))
    return told


def overwrite_the_weights(weights, memory, write):
    for target, source in zip(weights, memory, strict=True):
        np.copyto(target, source)
    return [write(array) for array in weights]


def shown_training(args):
    return f"weights of {len(args[0])} arrays at step {args[0][0][0]}"


# begins


def place(tensors):
    begins, at = {}, 0
    for name, itemsize, count in tensors:
        begins[name] = at
        at += itemsize * count
    return begins


def by_item_size(tensors):
    return place(sorted(tensors, key=lambda one: -one[1]))


def padded(tensors):
    begins, at = {}, 0
    for name, itemsize, count in tensors:
        at = -(-at // itemsize) * itemsize
        begins[name] = at
        at += itemsize * count
    return begins


def count_elements(tensors):
    begins, at = {}, 0
    for name, _, count in sorted(tensors, key=lambda one: -one[1]):
        begins[name] = at
        at += count
    return begins


def layout_cases(rng):
    fixed = [
        [("a", 4, 2)],
        [("a", 1, 3), ("b", 4, 1)],
        [("b", 2, 3), ("a", 2, 1), ("c", 8, 1)],
        [("bias", 4, 3), ("mask", 1, 5), ("step", 8, 1), ("weight", 2, 6)],
    ]
    drawn = [
        [(f"t{k}", int(2 ** rng.integers(0, 4)), int(rng.integers(0, 9))) for k in range(size)]
        for size in (3, 4, 5, 6, 8)
    ]
    return [(tensors,) for tensors in fixed + drawn]


EXERCISES = [
    Exercise(
        "repaired",
        repair,
        training_cases,
        {
            "You hand out the weights, under whatever name: training goes on changing them.": (
                lambda weights, memory, write: [write(array) for array in weights]
            ),
            "You copy an array when its turn comes; by then training has moved on.": copy_in_turn,
            "All of one step, but in memory that is new at every save.": (
                lambda weights, memory, write: [write(a) for a in [w.copy() for w in weights]]
            ),
            "You copy the memory over the weights: the model has forgotten what it learned.": (
                overwrite_the_weights
            ),
            "You write memory into which nothing was copied.": (
                lambda weights, memory, write: [write(array) for array in memory]
            ),
        },
        show=shown_training,
    ),
    Exercise(
        "begins",
        by_item_size,
        layout_cases,
        {
            "You keep the order of the state: a tensor can begin where its elements don't fit.": (
                place
            ),
            "You leave gaps between tensors, and safetensors allows none.": padded,
            "You sort by the bytes of a whole tensor, not of one element.": (
                lambda tensors: place(sorted(tensors, key=lambda one: -one[1] * one[2]))
            ),
            "You begin with the small elements, which leaves the large ones at odd places.": (
                lambda tensors: place(sorted(tensors, key=lambda one: one[1]))
            ),
            "You count elements where the header counts bytes.": count_elements,
            "Tensors with elements of one size have lost the order of the state.": (
                lambda tensors: place(sorted(tensors, key=lambda one: (-one[1], one[0])))
            ),
            "Tensors with elements of one size come in reverse.": (
                lambda tensors: place(sorted(tensors, key=lambda one: one[1])[::-1])
            ),
        },
    ),
]
