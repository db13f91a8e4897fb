"""Wrong answers to the exercises of notebook 09, each with a phrase of the message it deserves."""


def forgets_the_rank(order, rank, world_size, batch_size, step):
    return order[batch_size * step : batch_size * (step + 1)]


def forgets_the_others_in_a_step(order, rank, world_size, batch_size, step):
    begin = batch_size * step + batch_size * rank
    return order[begin : begin + batch_size]


def deals_out(order, rank, world_size, batch_size, step):
    mine = [order[k] for k in range(len(order)) if k % world_size == rank]
    return mine[batch_size * step : batch_size * (step + 1)]


def gives_stretches(order, rank, world_size, batch_size, step):
    each = len(order) // world_size
    mine = order[each * rank : each * (rank + 1)]
    return mine[batch_size * step : batch_size * (step + 1)]


def cuts_one_batch(order, rank, world_size, batch_size, step):
    batch = order[batch_size * step : batch_size * (step + 1)]
    size = batch_size // world_size
    return batch[size * rank : size * (rank + 1)]


def all_write_all(every):
    return [[(name, begin, rows) for name, begin, rows in pieces if rows] for pieces in every]


def by_name(every):
    written, shares = set(), [[] for _ in every]
    for rank in range(len(every)):
        for name, begin, rows in every[rank]:
            if rows and name not in written:
                shares[rank].append((name, begin, rows))
        written |= {name for name, _, rows in every[rank] if rows}
    return shares


def empty_ones_too(every):
    written, shares = [], []
    for pieces in every:
        shares.append([piece for piece in pieces if piece not in written])
        written += pieces
    return shares


def rank_0_alone(every):
    found = []
    for pieces in every:
        found += [piece for piece in pieces if piece not in found and piece[2] > 0]
    return [found, *([] for _ in every[1:])]


def highest_rank(every):
    shares, written = [], []
    for pieces in reversed(every):
        shares.insert(0, [piece for piece in pieces if piece not in written and piece[2] > 0])
        written += pieces
    return shares


def only_what_one_has(every):
    shares = []
    for rank, pieces in enumerate(every):
        others = [piece for k, more in enumerate(every) if k != rank for piece in more]
        shares.append([piece for piece in pieces if piece not in others and piece[2] > 0])
    return shares


WRONG = {
    "samples_of": [
        ("the same batch", forgets_the_rank),
        ("where rank 0 stopped", forgets_the_others_in_a_step),
        ("one by one", deals_out),
        ("a stretch of the epoch", gives_stretches),
        ("cut a single batch", cuts_one_batch),
    ],
    "who_writes": [
        ("written by all of them", all_write_all),
        ("the name alone", by_name),
        ("pieces of no rows", empty_ones_too),
        ("has not got", rank_0_alone),
        ("The highest rank", highest_rank),
        ("written by nobody", only_what_one_has),
    ],
}
