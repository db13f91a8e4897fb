"""Wrong answers to the exercises of notebook 00, each with a phrase of the message it deserves."""


def sums_durations(trace, lane):
    busy = 0
    for name, start, end in trace:
        if name == lane:
            busy += end - start
    first = min(row[1] for row in trace)
    last = max(row[2] for row in trace)
    return (last - first - busy) / (last - first)


def trusts_the_previous_end(trace, lane):
    covered = []
    for name, start, end in trace:
        if name != lane:
            continue
        if covered and start < covered[-1][1]:
            start = covered[-1][1]
        covered.append((start, end))
    busy = sum(max(end - start, 0) for start, end in covered)
    span = max(row[2] for row in trace) - min(row[1] for row in trace)
    return 1 - busy / span


def covered_units(rows):
    """The whole time units inside at least one interval; the cases use whole numbers."""
    return {unit for _, start, end in rows for unit in range(start, end)}


def times_the_lane_by_itself(trace, lane):
    rows = [row for row in trace if row[0] == lane]
    clock = range(min(row[1] for row in rows), max(row[2] for row in rows))
    return 1 - len(covered_units(rows)) / len(clock)


def starts_the_clock_at_zero(trace, lane):
    rows = [row for row in trace if row[0] == lane]
    last = max(row[2] for row in trace)
    return (last - len(covered_units(rows))) / last


def whole_clock(trace):
    return range(min(row[1] for row in trace), max(row[2] for row in trace))


def gives_the_busy_share(trace, lane):
    return len(covered_units([row for row in trace if row[0] == lane])) / len(whole_clock(trace))


def ignores_which_lane(trace, lane):
    return 1 - len(covered_units(trace)) / len(whole_clock(trace))


def gives_percent(trace, lane):
    return 100 - 100 * gives_the_busy_share(trace, lane)


def gives_idle_time(trace, lane):
    return len(set(whole_clock(trace)) - covered_units([r for r in trace if r[0] == lane]))


def believes_the_label(parts, name, factor):
    return factor


def removes_the_part(parts, name, factor):
    rest = [seconds for part, seconds in parts.items() if part != name]
    return sum(parts.values()) / sum(rest)


def averages_factors(parts, name, factor):
    total = sum(parts.values())
    return sum((factor if part == name else 1) * ms / total for part, ms in parts.items())


def new_over_old(parts, name, factor):
    faster = {**parts, name: parts[name] / factor}
    return sum(faster.values()) / sum(parts.values())


def share_saved(parts, name, factor):
    return (parts[name] - parts[name] / factor) / sum(parts.values())


def forgets_the_rest(parts, name, factor):
    return sum(parts.values()) / (parts[name] / factor)


def new_time(parts, name, factor):
    return sum(ms / factor if part == name else ms for part, ms in parts.items())


WRONG = {
    "idle_share": [
        ("they share counted twice", sums_durations),
        ("does not make the lane idle", trusts_the_previous_end),
        ("by its own clock", times_the_lane_by_itself),
        ("begins at time 0", starts_the_clock_at_zero),
        ("the lane is busy", gives_the_busy_share),
        ("Another lane's work", ignores_which_lane),
        ("percentage", gives_percent),
        ("a duration", gives_idle_time),
    ],
    "speedup": [
        ("how much faster the part gets", believes_the_label),
        ("treats the part as gone", removes_the_part),
        ("Factors were averaged", averages_factors),
        ("new time over old time", new_over_old),
        ("share of time saved", share_saved),
        ("the one faster part", forgets_the_rest),
        ("a duration, the new loop's", new_time),
    ],
}
