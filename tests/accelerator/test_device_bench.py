"""The device benchmark measures whatever accelerator is there."""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "materials" / "bench"))

from device import BENCH
from harness import main


def test_it_saves_in_each_way_and_brings_batches(sim, tmp_path):
    out = tmp_path / "out.json"
    code = main(
        BENCH, ["--size-mb", "1", "--repeats", "1", "--dir", str(tmp_path), "--json", str(out)]
    )
    assert code == 0
    found = {(row["group"], row["setting"]) for row in json.loads(out.read_text())["rows"]}
    saves = [f'snapshot="{one}"' for one in ("host", "overlap", "device")]
    wanted = {(group, one) for group in ("returned", "stall", "durable") for one in saves}
    assert found == wanted | {("stall", ""), ("batches", "device="), ("batches", ".to(device)")}
    assert [path.name for path in tmp_path.iterdir()] == ["out.json"]
