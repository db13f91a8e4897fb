"""Wrong answers to the exercises of notebook 03, each with a phrase of the message it deserves."""


def as_they_come(arrivals):
    delivered = []
    for number in arrivals:
        delivered.append([number])
    return delivered


def waits_for_all(arrivals):
    seen, delivered = [], []
    for number in arrivals:
        seen.append(number)
        delivered.append(sorted(seen) if len(seen) == len(arrivals) else [])
    return delivered


def one_per_arrival(arrivals):
    seen, delivered, turn = [], [], 0
    for number in arrivals:
        seen.append(number)
        if turn in seen:
            delivered.append([turn])
            turn += 1
        else:
            delivered.append([])
    return delivered


def forgets_the_early(arrivals):
    turn, delivered = 0, []
    for number in arrivals:
        if number == turn:
            delivered.append([turn])
            turn = turn + 1
        else:
            delivered.append([])
    return delivered


def empties_the_shelf(arrivals):
    shelf, delivered, turn = set(), [], 0
    for number in arrivals:
        shelf |= {number}
        if turn not in shelf:
            delivered.append([])
            continue
        delivered.append(sorted(shelf))
        turn = delivered[-1][-1] + 1
        shelf = set()
    return delivered


WRONG = {
    "in_order": [
        ("the order of the workers", as_they_come),
        ("hold all of it in memory", waits_for_all),
        ("one at most", one_per_arrival),
        ("is lost", forgets_the_early),
        ("across a gap", empties_the_shelf),
    ],
}
