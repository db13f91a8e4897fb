"""What lesson 06 breaks, counts, draws and serves."""

import json
import threading
import zipfile
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import torch
from files import File, Remote, first_pickles, slice_view
from safetensors.torch import save_file

from course.grading.child import what_happens as what_happens
from course.play import cells
from course.play.charts import compare as compare
from course.play.nb05 import SCRATCH, kilobytes, saved, twelve_matrices
from npydata.system.page_cache import evict, resident_pages

CORNER = np.s_[2:5, :10]
PAGES = 8
"""Those of a corner, on a machine that can count them."""

# Files that lie


def false_header():
    """Write a file of two tensors in whose header the second points to the first."""
    entry = {"dtype": "F32", "shape": [6], "data_offsets": [0, 24]}
    header, path = json.dumps({"a": entry, "b": entry}).encode(), SCRATCH / "liar.safetensors"
    data = torch.arange(12.0).numpy().tobytes()
    path.write_bytes(len(header).to_bytes(8, "little") + header + data)
    return path


def two_in_one():
    """Write a safetensors file with a torch file appended to it."""
    path = SCRATCH / "both.safetensors"
    save_file({"w": torch.ones(3)}, path)
    path.write_bytes(path.read_bytes() + six_numbers().read_bytes())
    return path


def header_of(path):
    """Return the header of a safetensors file, and where it ends."""
    data = path.read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    return json.loads(data[8:end]), end


def places_in(path):
    """Return where tensors begin and stop, where the first should begin, and the file's end."""
    header, begin = header_of(path)
    places = [tuple(begin + at for at in entry["data_offsets"]) for entry in header.values()]
    return places, begin, path.stat().st_size


# Counting


def exam(read):
    """Count what a reader costs."""
    path = twelve_matrices()
    old = saved(torch.load(path), old=True)
    pages = pages_read(lambda: read(path, "layer.7")[CORNER].clone())
    return {
        "copied for 1 of 12 matrices": f"{kilobytes(lambda: read(path, 'layer.7')):,} KB",
        "the same, in a file from before 2020": f"{kilobytes(lambda: read(old, 'layer.7')):,} KB",
        "pages read for 10 columns of 3 rows": pages,
    }


def pages_read(read):
    """Count the pages of the file of twelve matrices that come from the disk."""
    path = twelve_matrices()
    if evict(path):
        print("(This system keeps the file in memory: a figure from another machine.)")
        return PAGES
    read()
    return int(resident_pages(path).sum())


def after_the_pickles(describe):
    path = saved({"a": torch.ones(6), "b": torch.ones(6)}, old=True)
    _, at = first_pickles(File(path), 5, describe)
    return path.read_bytes()[at:]


# A server


def serve(path):
    """Serve ranges of one file; return its URL, and a list that grows: place and bytes sent."""
    sent = []

    class Ranges(BaseHTTPRequestHandler):
        def do_GET(self):
            size = path.stat().st_size
            begin, last = map(int, self.headers["Range"].removeprefix("bytes=").split("-"))
            end = min(last + 1, size)
            sent.append((begin, end - begin))
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {begin}-{end - 1}/{size}")
            self.send_header("Content-Length", str(end - begin))
            self.end_headers()
            self.wfile.write(File(path).read(begin, end - begin))

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Ranges)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return f"http://127.0.0.1:{server.server_port}/model.pt", sent


def over_http(MyCheckpoint, describe):
    """Read a corner of one matrix out of 2 GB; print what was sent, and return the sizes."""
    path = SCRATCH / "large.pt"
    with torch.serialization.skip_data():  # only its descriptions are written: it takes no room
        torch.save({f"layer.{k}": torch.empty(2048, 4096) for k in range(64)}, path)
    url, sent = serve(path)
    MyCheckpoint(Remote(url), describe).slice("layer.40", CORNER)
    for number, (begin, nbytes) in enumerate(sent, 1):
        print(f"{number:2} {nbytes:>7,} bytes from byte {begin:,} on")
    return [nbytes for _, nbytes in sent]


# The bytes of a file


def six_numbers():
    return saved(torch.arange(6))


def where_the_directory_leads(path):
    with zipfile.ZipFile(path) as archive:
        entry = archive.getinfo(f"{path.stem}/data/0")
    begin = entry.header_offset + 30 + len(entry.filename) + len(entry.extra)
    found = path.read_bytes()[begin : begin + 8]
    return f"other bytes, such as {found}" if any(found) else "the numbers"


# A view of a storage


def slices(byte_span, rows, column_step):
    """Return what the sliders draw: a slice of a matrix of 4 x 6, and its storage below."""
    index = np.s_[1 : 1 + rows, ::column_step]
    seen = slice_view(((4, 6), (6, 1), 0), index)
    first, stop = byte_span(seen, 4)
    chosen = np.arange(24).reshape(4, 6)[index]
    storage = [(k, "read ahead" if first <= 4 * k < stop else "not read") for k in range(24)]
    for k in chosen.flat:
        storage[k] = k, "chosen"
    lines = [(f"row {k}", storage[6 * k : 6 * k + 6]) for k in range(4)]
    title = f"matrix[1:{1 + rows}, ::{column_step}] spans bytes {first} to {stop}"
    text = "shape {}, strides {}, offset {}".format(*seen)
    text += f": wanted {4 * chosen.size} bytes, spanned {stop - first}, of 96"
    return cells.rows([*lines, ("storage", storage)], title), text
