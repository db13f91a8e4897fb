"""``npydata bench device`` measures whatever accelerator is there."""

import json

from npydata.cli import main


def test_it_saves_in_each_way_and_brings_batches(sim, tmp_path, capsys):
    out = tmp_path / "out.json"
    code = main(["bench", "device", "--size-mb", "1", "--repeats", "1", "--dir", str(tmp_path),
                 "--json", str(out)])  # fmt: skip
    assert code == 0
    rows = json.loads(out.read_text())["rows"]
    found = {(row["group"], row["setting"]) for row in rows}
    saves = {f'snapshot="{one}"' for one in ("host", "overlap", "device")}
    wanted = {(group, one) for group in ("returned", "stall", "durable") for one in saves}
    wanted |= {("copy", "into pinned memory"), ("batches", "device="), ("batches", ".to(device)")}
    assert found == wanted
    assert "Training stands still for a save" in capsys.readouterr().out
    assert [path.name for path in tmp_path.iterdir()] == ["out.json"]
