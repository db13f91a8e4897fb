"""Wrong answers to the exercises of notebook 03, each with a phrase of the message it deserves."""


def takes_the_remainder(position, n, scrambled):
    cell = scrambled[position]
    while cell >= n:
        cell -= n
    return cell


def goes_on_once(position, n, scrambled):
    cell = scrambled[position]
    if cell >= n:
        cell = scrambled[cell]
    return cell


def ignores_n(position, n, scrambled):
    return list(scrambled)[position]


def takes_the_neighbours(position, n, scrambled):
    for step in range(n):
        cell = scrambled[(position + step) % n]
        if cell < n:
            return cell


def tries_the_next_position(position, n, scrambled):
    cell = scrambled[position]
    while cell >= n:
        position = (position + 1) % len(scrambled)
        cell = scrambled[position]
    return cell


def clips(position, n, scrambled):
    cell = scrambled[position]
    if cell > n - 1:
        cell = n - 1
    return cell


def walks_backwards(position, n, scrambled):
    while True:
        position = scrambled.index(position)
        if position < n:
            return position


def filters_the_list(position, n, scrambled):
    samples = [cell for cell in scrambled if cell < n]
    return samples[position]


def does_not_shuffle(position, n, scrambled):
    return position


def walks_on_the_spot(position, n, scrambled):
    cell = scrambled[position]
    while cell >= n:
        cell = scrambled[position]
    return cell


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


def cut(order, size):
    batches = []
    while order:
        batches.append(order[:size])
        order = order[size:]
    return batches


def skips_the_prefetched(order, batch_size, made, delivered, new_batch_size):
    return cut(order[made * batch_size :], new_batch_size)


def counts_in_the_new_size(order, batch_size, made, delivered, new_batch_size):
    return cut(order, new_batch_size)[delivered:]


def repeats_the_last(order, batch_size, made, delivered, new_batch_size):
    return cut(order[(delivered - 1 if delivered else 0) * batch_size :], new_batch_size)


def keeps_the_old_size(order, batch_size, made, delivered, new_batch_size):
    return cut(order, batch_size)[delivered:]


def drops_the_short_one(order, batch_size, made, delivered, new_batch_size):
    rest = order[delivered * batch_size :]
    return cut(rest[: len(rest) - len(rest) % new_batch_size], new_batch_size)


def starts_again(order, batch_size, made, delivered, new_batch_size):
    return cut(order, new_batch_size)


def resumes_too_late(order, batch_size, made, delivered, new_batch_size):
    return cut(order[(delivered + 1) * batch_size :], new_batch_size)


def one_flat_list(order, batch_size, made, delivered, new_batch_size):
    return list(order[delivered * batch_size :])


WRONG = {
    "shuffled": [
        ("two positions then share", takes_the_remainder),
        ("may lie outside too", goes_on_once),
        ("have no sample", ignores_n),
        ("is then given out twice", takes_the_neighbours),
        ("which has its own sample", tries_the_next_position),
        ("cut off at the last sample", clips),
        ("the position that leads here", walks_backwards),
        ("through the whole list", filters_the_list),
        ("the order as it was", does_not_shuffle),
        ("did not come to an end", walks_on_the_spot),
    ],
    "in_order": [
        ("the order of the workers", as_they_come),
        ("hold all of it in memory", waits_for_all),
        ("one at most", one_per_arrival),
        ("is lost", forgets_the_early),
        ("across a gap", empties_the_shelf),
    ],
    "resumed": [
        ("behind what was made", skips_the_prefetched),
        ("delivered in the old one", counts_in_the_new_size),
        ("once more", repeats_the_last),
        ("in the old batch size", keeps_the_old_size),
        ("when it is short", drops_the_short_one),
        ("from its beginning", starts_again),
        ("that nobody was given", resumes_too_late),
        ("in one piece", one_flat_list),
    ],
}
