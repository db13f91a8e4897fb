"""What lesson 06 breaks, counts, draws and serves."""

import inspect
import json
import shutil
import threading
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import import_module
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle
from safetensors.torch import save_file

from course import lab
from course.grading.child import what_happens
from course.lesson import GIVEN
from course.play.cells import COLOURS, INK
from course.play.nb00 import bytes_read
from course.play.nb05 import SCRATCH, saved, twelve_matrices
from npydata import open_checkpoint
from npydata.system.page_cache import evict, resident_pages

given = import_module("files")
File, Remote = given.File, given.Remote
CORNER = np.s_[2:5, :10]
A, B = torch.arange(6.0), 10 + torch.arange(6.0)

# Files that lie


def with_header(path: Path, entries: dict[str, Any], data: bytes) -> Path:
    header = json.dumps(entries).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + data)
    return path


def false_header() -> Path:
    """Write a file of two tensors in whose header the second points to the first."""
    entry = {"dtype": "F32", "shape": [6], "data_offsets": [0, 24]}
    data = A.numpy().tobytes() + B.numpy().tobytes()
    return with_header(SCRATCH / "liar.safetensors", {"a": entry, "b": entry}, data)


def header_of(path: Path) -> tuple[dict[str, Any], int]:
    data = path.read_bytes()
    begin = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:begin])
    header.pop("__metadata__", None)
    return header, begin


def show_header(path: Path) -> None:
    header, begin = header_of(path)
    for name, entry in header.items():
        print(f"{name}: {json.dumps(entry)}")
    print(f"after the header: {path.stat().st_size - begin} bytes")


def whose_numbers(read_tensor: Callable[..., Any], path: Path) -> str:
    found = read_tensor(path, "b")
    return "the numbers of " + ("a" if torch.equal(found, A) else "b")


def two_in_one() -> Path:
    """Write a safetensors file with a torch file appended to it."""
    path = SCRATCH / "two.safetensors"
    save_file({"w": torch.ones(3)}, path)
    path.write_bytes(path.read_bytes() + six_numbers().read_bytes())
    return path


def is_zip_file(path: Path) -> str:
    return "a zip file" if zipfile.is_zipfile(path) else "no zip file"


def try_places(check_no_gaps: Callable[..., None], *paths: Path) -> None:
    for path in paths:
        header, begin = header_of(path)
        places = [
            (begin + first, begin + stop)
            for first, stop in (entry["data_offsets"] for entry in header.values())
        ]
        end = path.stat().st_size
        ended = what_happens(
            lambda places=places, at=begin, end=end: check_no_gaps(places, at, end)
        )
        print(f"{path.stem}: {ended.replace('None', 'accepted')}")


# Counting

LIE, TWO = "a header that points to another tensor", "a file that is two files"
COPIED, OLD = "copied for 1 of 12 matrices", "the same, in a file from before 2020"
PAGES = "pages read for 10 columns of 3 rows"


def twelve_old() -> Path:
    return saved(torch.load(twelve_matrices()), old=True)


def exam(read_tensor: Callable[..., Any]) -> dict[str, str]:
    """Count what goes wrong with the reader of lesson 00 and with torch's."""
    new, old = twelve_matrices(), twelve_old()
    found = {
        LIE: ended(lambda: read_tensor(false_header(), "b")),
        TWO: ended(lambda: read_tensor(two_in_one(), "w")),
        COPIED: f"{kilobytes(lambda: torch.load(new)['layer.7']):,} KB",
        OLD: f"{kilobytes(lambda: torch.load(old)['layer.7']):,} KB",
        PAGES: f"{len(pages_read(lambda: torch.load(new)['layer.7'][CORNER], 12_289)):,}",
    }
    for what, value in found.items():
        print(f"{what:<42}{value}")
    return found


def exam_of(MyCheckpoint: Any, describe: Any) -> dict[str, str]:
    """Count the same with the learner's."""

    def read(path: Path, name: str) -> torch.Tensor:
        return MyCheckpoint(File(path), describe)[name]

    new, old = twelve_matrices(), twelve_old()
    return {
        LIE: ended(lambda: read(false_header(), "b")),
        TWO: ended(lambda: read(two_in_one(), "w")),
        COPIED: f"{kilobytes(lambda: read(new, 'layer.7'))} KB",
        OLD: f"{kilobytes(lambda: read(old, 'layer.7'))} KB",
        PAGES: f"{len(pages_of_a_corner(MyCheckpoint, describe))}",
    }


def kilobytes(read: Callable[[], object]) -> int:
    return round(bytes_read(read) / 1000)


def ended(read: Callable[[], torch.Tensor]) -> str:
    return what_happens(lambda: bool(len(read()))).split(":")[0].replace("True", "it is read")


def compare(before: dict[str, str], after: dict[str, str]) -> None:
    for what, value in before.items():
        print(f"{what:<42}{value} -> {after[what]}")


def pages_read(read: Callable[[], object], elsewhere: int = 6) -> list[int]:
    """Return which pages of the file of twelve matrices come from the disk."""
    path = twelve_matrices()
    if evict(path):
        print("(This system keeps the file in memory: a figure from another machine.)")
        return [0] * elsewhere
    read()
    return np.flatnonzero(resident_pages(path)).tolist()


def pages_of_a_corner(MyCheckpoint: Any, describe: Any) -> list[int]:
    def read() -> None:
        MyCheckpoint(File(twelve_matrices()), describe).slice("layer.7", CORNER).clone()

    return pages_read(read)


def read_back(MyCheckpoint: Any, describe: Any) -> None:
    """Compare a matrix with torch's, and see whether writing to it changes the file."""
    path = twelve_matrices()
    matrix = MyCheckpoint(File(path), describe)["layer.7"]
    whole = torch.load(path)["layer.7"]
    print("as it was saved:", torch.equal(matrix, whole))
    matrix += 1
    print("the file after writing:", torch.equal(torch.load(path)["layer.7"], whole))


def after_the_pickles(describe: Any) -> bytes:
    path = saved({"a": A, "b": B}, old=True)
    _, at = given.first_pickles(File(path), 5, describe)
    return path.read_bytes()[at:]


def jumps(names: list[str] | None = None) -> int:
    """Count the steps from one tensor to the next that go back or skip bytes."""
    path, asked = SCRATCH / "layers.safetensors", []
    for layer in range(24):
        asked += [f"layer.{layer}.weight", f"layer.{layer}.bias"]
    save_file({name: torch.ones(4096 if "weight" in name else 64) for name in asked}, path)
    header, _ = header_of(path)
    places = [header[name]["data_offsets"] for name in (names or asked)]
    return sum(one[1] != other[0] for one, other in pairwise(places))


def in_file_order() -> None:
    jumps()
    header, _ = header_of(SCRATCH / "layers.safetensors")
    names = sorted(header, key=lambda name: header[name]["data_offsets"])
    print("first in the file:", ", ".join(names[:4]), "...")
    print("sorted by place, steps that jump:", jumps(names))


def put_beside() -> None:
    """Put beside checkpoint.py what it imports."""
    for name in ("files.py", "opcodes.py"):
        shutil.copy(GIVEN / name, lab.folder() / name)


def show(function: Callable[..., Any]) -> None:
    print(inspect.getsource(function))


# A server


@contextmanager
def server(path: Path) -> Iterator[tuple[str, dict[str, int]]]:
    """Serve ranges of one file; give its URL, and the bytes that were sent by request."""
    sent: dict[str, int] = {}

    class Ranges(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked = self.headers.get("Range", "bytes=0-")
            first, _, last = asked.removeprefix("bytes=").partition("-")
            size = path.stat().st_size
            begin, end = int(first), min(int(last or size - 1), size - 1) + 1
            with open(path, "rb") as file:
                file.seek(begin)
                data = file.read(end - begin)
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {begin}-{end - 1}/{size}")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)
            sent[f"{len(sent) + 1}. bytes {begin:,} to {end - 1:,}"] = len(data)

        def log_message(self, *_: Any) -> None:
            pass

    serving = ThreadingHTTPServer(("127.0.0.1", 0), Ranges)
    thread = threading.Thread(target=serving.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{serving.server_port}/model.pt", sent
    finally:
        serving.shutdown()
        serving.server_close()


def large_file() -> Path:
    """Write a torch file of 2 GB that takes no room: only the corner has numbers."""
    path = SCRATCH / "large.pt"
    weights = {f"layer.{k}": torch.empty(2048, 4096) for k in range(64)}
    with torch.serialization.skip_data():
        torch.save(weights, path)
    return path


def over_http(MyCheckpoint: Any, describe: Any) -> dict[str, int]:
    """Read a corner of one matrix from a server; return the requests and the bytes of each."""
    path = large_file()
    with server(path) as (url, sent):
        corner = MyCheckpoint(Remote(url), describe).slice("layer.40", CORNER)
    print(f"{path.stat().st_size:,} bytes on the server; shape {tuple(corner.shape)}")
    return sent


def show_requests(sent: dict[str, int]) -> None:
    """List them, and count those of the library beside them."""
    for what, nbytes in sent.items():
        print(f"{what:<44}{nbytes:>8,}")
    with server(SCRATCH / "large.pt") as (url, others), open_checkpoint(url) as ckpt:
        ckpt.get_slice("layer.40")[CORNER]
    print(f"the library: {len(others)} requests, {sum(others.values()):,} bytes")


# The bytes of a file

ROLES = {
    "header": "#7fb2e5", "padding": "#f3f4f6", "description": "#f2b84b", "payload": "#0f766e",
    "trailer": "#d1d5db", "directory": "#dbe7f3",
}  # fmt: skip
ROW = 64


def six_numbers() -> Path:
    return saved(torch.arange(6))


def local_header(path: Path, name: str = "data/0") -> tuple[bytes, zipfile.ZipInfo]:
    with zipfile.ZipFile(path) as archive:
        entry = next(one for one in archive.infolist() if one.filename.endswith("/" + name))
    return path.read_bytes()[entry.header_offset :][:30], entry


def where_the_directory_leads(path: Path) -> str:
    _, entry = local_header(path)
    begin = entry.header_offset + 30 + len(entry.filename) + len(entry.extra)
    found = path.read_bytes()[begin : begin + 48]
    numbers = torch.frombuffer(bytearray(found), dtype=torch.int64).tolist()
    return "the numbers" if numbers == list(range(6)) else f"other bytes, such as {found[4:12]}"


def draw_file(path: Path, payload_begin: Callable[[bytes, int], int]) -> None:
    """Draw the bytes of a torch file in rows, each part in the colour of its role."""
    data, parts = path.read_bytes(), []
    with zipfile.ZipFile(path) as archive:
        entries = sorted(archive.infolist(), key=lambda one: one.header_offset)
        end = archive.start_dir
    stops = [*(one.header_offset for one in entries[1:]), end]
    for entry, stop in zip(entries, stops, strict=True):
        at, name = entry.header_offset, entry.filename.partition("/")[2]
        begin = payload_begin(data[at : at + 30], at)
        padding = at + 30 + int.from_bytes(data[at + 26 : at + 28], "little")
        role = "payload" if name.startswith("data/") else "description"
        parts += [("", at, padding, "header"), ("", padding, begin, "padding")]
        parts += [(name, begin, begin + entry.file_size, role)]
        parts += [("", begin + entry.file_size, stop, "trailer")]
    parts.append(("directory", end, len(data), "directory"))
    figure = Figure(figsize=(8, 4.6), layout="constrained")
    ax = figure.subplots()
    for name, begin, stop, role in parts:
        pieces = []
        while begin < stop:
            width = min(stop - begin, ROW - begin % ROW)
            pieces.append((width, begin % ROW, begin // ROW))
            begin += width
        for width, left, row in pieces:
            box = {"fc": ROLES[role], "ec": "#9ca3af", "lw": 0.6}
            ax.add_patch(Rectangle((left, row - 0.4), width, 0.8, **box))
        if name:
            width, left, row = max(pieces, key=lambda piece: (piece[0], -piece[2]))
            fits = width > 0.95 * len(name)
            x, align = (left + width / 2, "center") if fits else (left + width + 0.6, "left")
            ink = "white" if fits and role == "payload" else INK
            ax.text(x, row, name, ha=align, va="center", fontsize=9, color=ink)
    rows = -(-len(data) // ROW)
    ax.set(xlim=(0, ROW), ylim=(rows - 0.4, -0.6), xticks=range(0, ROW + 1, 16))
    ax.set_yticks(range(0, rows, 2), [f"{ROW * row:,}" for row in range(0, rows, 2)])
    ax.set_xlabel(f"byte within its row of {ROW}")
    ax.set_ylabel("byte at the row's start")
    ax.set_title("A file of torch.save, byte by byte", loc="left", fontweight="bold", pad=26)
    ax.spines[:].set_visible(False)
    patches = [Patch(fc=fill, ec="#9ca3af", label=role) for role, fill in ROLES.items()]
    ax.legend(handles=patches, ncols=6, loc="lower left", bbox_to_anchor=(-0.01, 1),
              frameon=False, fontsize=9, handlelength=1.1, columnspacing=1.1)  # fmt: skip
    lines = [f"{name:<18} bytes {a:>5,} to {b:>5,}" for name, a, b, _ in parts if name]
    lab.picture(figure, "\n".join(lines))


# A view of a storage


def slices(byte_span: Callable[..., tuple[int, int]]) -> Callable[..., tuple[Figure, str]]:
    """Return what the sliders draw: a slice of a matrix of 4 x 6, and its storage below."""

    def draw(first_row: int, rows: int, first_column: int, column_step: int) -> tuple[Figure, str]:
        index = (slice(first_row, first_row + rows), slice(first_column, 6, column_step))
        seen = given.slice_view(((4, 6), (6, 1), 0), index)
        first, stop = byte_span(seen, 4)
        chosen = set(np.arange(24).reshape(4, 6)[index].ravel().tolist())
        figure = Figure(figsize=(8, 3.4), layout="constrained")
        ax = figure.subplots()
        for k in range(24):
            role = "read ahead" if 4 * k in range(first, stop) else "not read"
            fill = COLOURS["chosen" if k in chosen else role]
            for x, y, width in ((7 + 2 * (k % 6), 1.2 * (k // 6), 2), (k, 6.2, 1)):
                box = {"fc": fill, "ec": "#9ca3af", "lw": 0.8}
                ax.add_patch(Rectangle((x, y), width, 1, **box))
                ink = "white" if k in chosen else INK
                ax.text(x + width / 2, y + 0.5, k, ha="center", va="center", color=ink, fontsize=9)
        ax.text(6.7, 2.4, "the matrix", ha="right", va="center")
        ax.text(0, 5.85, "its storage", va="center")
        ends = {"arrowstyle": "<->", "lw": 1.6}
        ax.annotate("", (first / 4, 7.5), (stop / 4, 7.5), arrowprops=ends)
        middle = (first + stop) / 8
        ax.text(middle, 8, f"byte span: {first} to {stop}", ha="center", va="center")
        ax.set(xlim=(-0.2, 24.2), ylim=(8.4, -0.2))
        title = f"rows {first_row}:{first_row + rows}, columns {first_column}:6:{column_step}"
        ax.set_title(title, loc="left", fontweight="bold")
        ax.axis("off")
        shape, stride, offset = seen
        return figure, (
            f"shape {shape}, strides {stride}, offset {offset}: wanted {4 * prod(shape)} bytes, "
            f"spanned {stop - first}, of 96"
        )

    return draw
