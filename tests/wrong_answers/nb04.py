"""Wrong answers to the exercises of notebook 04, each with a phrase of the message it deserves."""


def name_and_extra(header):
    return header[26] + 256 * header[27], header[28] + 256 * header[29]


def forgets_the_padding(header, at):
    name, _ = name_and_extra(header)
    return at + len(header) + name


def counts_from_the_header(header, at):
    name, extra = name_and_extra(header)
    return len(header) + name + extra


def forgets_the_fixed_part(header, at):
    name, extra = name_and_extra(header)
    return at + name + extra


def reads_the_large_byte_first(header, at):
    return at + 30 + 256 * (header[26] + header[28]) + header[27] + header[29]


def rounds_up(header, at):
    place = at + 30 + sum(name_and_extra(header))
    while place % 64:
        place += 1
    return place


def goes_to_the_end(header, at):
    return at + 30 + sum(name_and_extra(header)) + header[22]


def gives_the_counts(at, counts, itemsizes):
    places = []
    for numel, itemsize in zip(counts, itemsizes, strict=True):
        places.append(at)
        at = at + 8 + numel * itemsize
    return places


def knows_one_count(at, counts, itemsizes):
    places = [at + 8]
    for numel, itemsize in zip(counts[:-1], itemsizes[:-1], strict=True):
        places.append(places[-1] + numel * itemsize)
    return places


def knows_no_count(at, counts, itemsizes):
    places = [at]
    for numel, itemsize in zip(counts[:-1], itemsizes[:-1], strict=True):
        places.append(places[-1] + numel * itemsize)
    return places


def hops_by_elements(at, counts, itemsizes):
    places = []
    for numel in counts:
        places.append(at + 8)
        at = places[-1] + numel
    return places


def pads(at, counts, itemsizes):
    places = []
    for numel, itemsize in zip(counts, itemsizes, strict=True):
        at += 8
        at += -at % 64
        places.append(at)
        at += numel * itemsize
    return places


def begins_at_zero(at, counts, itemsizes):
    at, places = 0, []
    for numel, itemsize in zip(counts, itemsizes, strict=True):
        places.append(at + 8)
        at += 8 + numel * itemsize
    return places


def numel(shape):
    found = 1
    for size in shape:
        found = found * size
    return found


def last_element(shape, stride, offset):
    return offset + sum(size * step - step for size, step in zip(shape, stride, strict=True))


def believes_it_is_contiguous(shape, stride, offset, itemsize):
    return offset * itemsize, offset * itemsize + numel(shape) * itemsize


def cuts_the_last_off(shape, stride, offset, itemsize):
    end = last_element(shape, stride, offset) if numel(shape) else offset
    return offset * itemsize, end * itemsize


def steps_once_too_often(shape, stride, offset, itemsize):
    end = offset
    for size, step in zip(shape, stride, strict=True):
        end += size * step
    return itemsize * offset, itemsize * end


def takes_the_offset_for_bytes(shape, stride, offset, itemsize):
    elements = last_element(shape, stride, 0) + 1 if numel(shape) else 0
    return offset, offset + elements * itemsize


def answers_in_elements(shape, stride, offset, itemsize):
    return offset, last_element(shape, stride, offset) + 1 if numel(shape) else offset


def forgets_the_empty(shape, stride, offset, itemsize):
    return offset * itemsize, (last_element(shape, stride, offset) + 1) * itemsize


WRONG = {
    "payload_starts": [
        ("but not over the extra field", forgets_the_padding),
        ("where in the file", counts_from_the_header),
        ("leave out the 30 bytes", forgets_the_fixed_part),
        ("the large byte first", reads_the_large_byte_first),
        ("round up to 64", rounds_up),
        ("where its bytes end", goes_to_the_end),
    ],
    "storage_starts": [
        ("the place of each count", gives_the_counts),
        ("each storage has its own", knows_one_count),
        ("side by side", knows_no_count),
        ("an element has several", hops_by_elements),
        ("these files have no padding", pads),
        ("begin at 0", begins_at_zero),
    ],
    "span": [
        ("it reaches further than that", believes_it_is_contiguous),
        ("where the last element begins", cuts_the_last_off),
        ("one step less than n", steps_once_too_often),
        ("Your offset counts bytes", takes_the_offset_for_bytes),
        ("a span is in bytes", answers_in_elements),
        ("A view without elements", forgets_the_empty),
    ],
}
