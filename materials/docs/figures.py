"""Write the figures that `arriving.md` quotes from the saved results: nothing is typed by hand.

python materials/docs/figures.py
"""

import json
import re
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).resolve().parent
PAGE = HERE / "arriving.md"
RESULTS = HERE.parent / "results"
BLOCK = re.compile(r"<!-- gain: (\w+) -->\n.*?<!-- /gain -->", re.S)


class Line(NamedTuple):
    """One line of a table: what to call it, and the saved row that it quotes."""

    text: str
    benchmark: str
    group: str
    name: str
    setting: str = ""


RECOMMENDED, DEFAULT = "1 worker, prefetch 16", "2 workers, prefetch 2 (default)"
GAINS = {
    "dataloader": [
        Line("`DataLoader`, 0 workers", "loader", "warm", "naive DataLoader", "0 workers"),
        Line("`DataLoader`, 2 workers", "loader", "warm", "naive DataLoader",
             "2 workers, prefetch 2"),
        Line("`AsyncDataLoader`, default setting", "loader", "warm", "ours", DEFAULT),
        Line("`AsyncDataLoader`, 1 worker, prefetch 16", "loader", "warm", "ours", RECOMMENDED),
        Line("`DataLoader`, 0 workers, file on the disk", "loader", "cold", "naive DataLoader",
             "0 workers"),
        Line("`AsyncDataLoader`, default setting, file on the disk", "loader", "cold", "ours",
             DEFAULT),
    ],
    "nanogpt": [
        Line("`get_batch` before", "dataset", "warm", "nanoGPT style", "in process"),
        Line("`get_batch` after", "dataset", "warm", "ours", "random windows, in process"),
        Line("before, file on the disk", "dataset", "cold", "nanoGPT style", "readahead as it is"),
        Line("after, announced as below, file on the disk", "dataset", "cold", "ours",
             "hints 4 ahead"),
    ],
    "save": [
        Line("training stands still: `torch.save` and fsync", "checkpoint", "stall",
             "torch.save + fsync"),
        Line("... `AsyncCheckpointer()`", "checkpoint", "stall", "ours"),
        Line('... `AsyncCheckpointer(snapshot="overlap")`', "checkpoint", "stall", "ours, overlap"),
        Line("until the disk has it: `torch.save` and fsync", "checkpoint", "durable",
             "torch.save + fsync"),
        Line("... `AsyncCheckpointer()`", "checkpoint", "durable", "ours"),
        Line("memory beside the state: `torch.save`", "checkpoint", "peak", "torch.save + fsync"),
        Line("... `AsyncCheckpointer()`", "checkpoint", "peak", "ours"),
    ],
    "load": [
        Line("`torch.load`", "reader", "zip cold", "torch.load"),
        Line("`torch.load(mmap=True)`", "reader", "zip cold", "torch.load(mmap=True)"),
        Line("`open_checkpoint`", "reader", "zip cold", "ours"),
    ],
}  # fmt: skip


def table(lines: list[Line]) -> str:
    """One table: medians with their range, and the machine and command below it."""
    rows = ["| | | min to max |", "|---|---:|---:|"]
    for line in lines:
        row = find(line)
        spread = f"{figure(row['min'])} to {figure(row['max'])}"
        rows.append(f"| {line.text} | {figure(row['median'])} {row['unit']} | {spread} |")
    return "\n".join([*rows, "", source(lines[0].benchmark)])


def find(line: Line) -> dict[str, Any]:
    """Return the saved row of a line."""
    wanted = (line.group, line.name, line.setting)
    rows = report(line.benchmark)["rows"]
    found = [row for row in rows if (row["group"], row["name"], row["setting"]) == wanted]
    if len(found) != 1:
        raise LookupError(f"{line.benchmark}.json: {len(found)} rows {wanted}, expected 1")
    return found[0]


def source(benchmark: str) -> str:
    """Say where a figure comes from, and how to measure it again."""
    saved = report(benchmark)
    machine, settings = saved["machine"], saved["settings"]
    return (
        f"{workload(settings)}; medians of {settings['repeats']} runs on {machine['cpu']}, "
        f"{machine['cores']} cores, {machine['file_system']} "
        f"([{benchmark}.json](../results/{benchmark}.json)). On your machine: "
        f"`npydata bench {benchmark}`."
    )


def workload(settings: dict[str, Any]) -> str:
    """Say what was read or written."""
    if "seq_len" in settings:
        return (
            f"Random windows of {settings['seq_len']:,} tokens, {settings['batch_size']} to a "
            f"batch, from a file of {settings['warm_file_bytes'] / 1e9:.1f} GB"
        )
    if "state_bytes" in settings:
        return f"A state of {settings['state_bytes'] / 2**30:g} GiB, not the first save"
    return (
        f"{settings['tensor_bytes'] / 2**20:g} MiB from the middle of a file of "
        f"{settings['file_bytes'] / 2**30:g} GiB, opening it included"
    )


def report(benchmark: str) -> dict[str, Any]:
    """Read the saved results of one benchmark."""
    text = (RESULTS / f"{benchmark}.json").read_text(encoding="utf-8")
    return dict(json.loads(text))


def figure(value: float) -> str:
    """Three digits, or all before the point."""
    return f"{value:.3g}" if value < 999.5 else f"{value:,.0f}"


def rendered(page: str) -> str:
    """The page with each marked block replaced by its table."""

    def block(match: re.Match[str]) -> str:
        return f"<!-- gain: {match[1]} -->\n{table(GAINS[match[1]])}\n<!-- /gain -->"

    return BLOCK.sub(block, page)


if __name__ == "__main__":
    PAGE.write_text(rendered(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
