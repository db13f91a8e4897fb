"""Wrong answers to the exercises of notebook 06, each with a phrase of the message it deserves."""


def name_and_extra(header):
    return header[26] + 256 * header[27], header[28] + 256 * header[29]


def forgets_the_padding(header, at):
    name, _ = name_and_extra(header)
    return at + len(header) + name


def forgets_the_name(header, at):
    _, extra = name_and_extra(header)
    return at + len(header) + extra


def reads_half_of_each_length(header, at):
    return at + len(header) + header[26] + header[28]


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


def gives_the_ends(at, counts, itemsizes):
    ends = []
    for numel, itemsize in zip(counts, itemsizes, strict=True):
        at += 8 + numel * itemsize
        ends.append(at)
    return ends


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


def adds_a_stride_and_an_element(shape, stride, offset, itemsize):
    end = offset
    if numel(shape):
        end += sum(size * step for size, step in zip(shape, stride, strict=True)) + 1
    return itemsize * offset, itemsize * end


def begins_with_the_storage(shape, stride, offset, itemsize):
    end = last_element(shape, stride, offset) + 1 if numel(shape) else offset
    return 0, end * itemsize


def gives_the_length(shape, stride, offset, itemsize):
    elements = last_element(shape, stride, 0) + 1 if numel(shape) else 0
    return offset * itemsize, elements * itemsize


def gives_the_last_byte(shape, stride, offset, itemsize):
    begin = offset * itemsize
    if not numel(shape):
        return begin, begin
    return begin, (last_element(shape, stride, offset) + 1) * itemsize - 1


def cuts_the_last_off_and_forgets_the_empty(shape, stride, offset, itemsize):
    return offset * itemsize, last_element(shape, stride, offset) * itemsize


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
        ("but not over the name", forgets_the_name),
        ("a length has two", reads_half_of_each_length),
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
        ("where they begin", gives_the_ends),
        ("begin at 0", begins_at_zero),
    ],
    "span": [
        ("it reaches further than that", believes_it_is_contiguous),
        ("where the last element begins", cuts_the_last_off),
        ("one step less than n", steps_once_too_often),
        ("one step too far in every dimension", adds_a_stride_and_an_element),
        ("the view begins at its offset", begins_with_the_storage),
        ("asked is where it ends", gives_the_length),
        ("asked is the one after it", gives_the_last_byte),
        ("You cut off the last element, and", cuts_the_last_off_and_forgets_the_empty),
        ("Your offset counts bytes", takes_the_offset_for_bytes),
        ("a span is in bytes", answers_in_elements),
        ("A view without elements", forgets_the_empty),
    ],
}
