"""Wrong answers to the exercises of notebook 07, each with a phrase of the message it deserves."""

import numpy as np


def writes_the_weights(weights, memory, write):
    return [write(weights[k]) for k in range(len(weights))]


def gives_them_another_name(weights, memory, write):
    for k in range(len(weights)):
        memory[k] = weights[k]
    return [write(array) for array in memory]


def copies_one_by_one(weights, memory, write):
    told = []
    for k in range(len(weights)):
        memory[k][:] = weights[k]
        told.append(write(memory[k]))
    return told


def clones(weights, memory, write):
    copies = [np.array(array) for array in weights]
    return [write(array) for array in copies]


def copies_the_wrong_way(weights, memory, write):
    for k in range(len(weights)):
        weights[k][:] = memory[k]
    return [write(array) for array in weights]


def copies_nothing(weights, memory, write):
    return [write(memory[k]) for k in range(len(memory))]


def in_the_given_order(tensors):
    begins, end = {}, 0
    for name, itemsize, count in tensors:
        begins[name], end = end, end + itemsize * count
    return begins


def aligned_with_gaps(tensors):
    begins, end = {}, 0
    for name, itemsize, count in tensors:
        while end % itemsize:
            end += 1
        begins[name], end = end, end + itemsize * count
    return begins


def largest_tensor_first(tensors):
    return in_the_given_order(sorted(tensors, key=lambda one: -(one[1] * one[2])))


def smallest_elements_first(tensors):
    return in_the_given_order(sorted(tensors, key=lambda one: one[1]))


def in_elements(tensors):
    ordered = sorted(tensors, key=lambda one: -one[1])
    return in_the_given_order([(name, 1, count) for name, _, count in ordered])


def by_name_within_a_size(tensors):
    return in_the_given_order(sorted(tensors, key=lambda one: (-one[1], one[0])))


def sorted_and_turned_round(tensors):
    upwards = sorted(tensors, key=lambda one: one[1])
    return in_the_given_order(upwards[::-1])


WRONG = {
    "repaired": [
        ("under whatever name", writes_the_weights),
        ("when its turn comes", copies_one_by_one),
        ("new at every save", clones),
        ("forgotten what it learned", copies_the_wrong_way),
        ("nothing was copied", copies_nothing),
    ],
    "begins": [
        ("the order of the state: a tensor", in_the_given_order),
        ("leave gaps", aligned_with_gaps),
        ("of a whole tensor", largest_tensor_first),
        ("begin with the small", smallest_elements_first),
        ("count elements", in_elements),
        ("lost the order", by_name_within_a_size),
        ("in reverse", sorted_and_turned_round),
    ],
}
