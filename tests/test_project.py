"""The project's own shape: one door, arrows one way, and files that say the same."""

import ast
import re
import subprocess
import sys
import tomllib
from itertools import chain
from pathlib import Path

import pytest

import npydata

ROOT = Path(__file__).parent.parent
CONDA_NAMES = {"torch": "pytorch"}
RANK = [
    {"errors", "atomic", "progress"},
    {"pages", "formats", "windows", "text"},
    {"access"},
    {"tokens"},
    {"fingerprint", "prepare"},
    {"dataset"},
]
LOADER_RANK = [
    {"errors", "windows", "handover"},
    {"schedule", "buffers", "device"},
    {"batches", "iterator"},
    {"loader"},
]

CHECKPOINT_WING = {"lazy": {"errors", "atomic", "pages", "progress"},
                   "checkpoint": {"errors", "atomic", "pages", "progress", "lazy"}}  # fmt: skip
"""What the rooms of the checkpoint wing may import, beside their own modules."""


def requirement_names(requirements):
    parsed = (re.fullmatch(r"([\w-]+)(?:\[\w+\])?(.*)", r).groups() for r in requirements)
    return {f"{CONDA_NAMES.get(name, name)}{version}" for name, version in parsed}


def everything_asked_for(project):
    return [*project["dependencies"], *chain(*project["optional-dependencies"].values())]


def test_environment_yml_asks_for_what_pyproject_asks_for():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = requirement_names(everything_asked_for(project))
    wanted |= {"python" + project["requires-python"]}
    lines = (ROOT / "environment.yml").read_text().split("dependencies:")[1].splitlines()
    listed = {line.strip("- ") for line in lines if line.startswith("  - ")}
    assert listed - {"pip", "pip:"} == wanted
    assert "pip" in listed


def test_constraints_pin_everything_pyproject_asks_for():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    names = {re.match(r"[\w-]+", asked)[0] for asked in everything_asked_for(project)}
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = {line.split("==")[0] for line in lines if "==" in line}
    assert names <= pinned


def test_the_version_is_stated_once():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert npydata.__version__ == project["version"]


@pytest.mark.parametrize("name", npydata.__all__)
def test_every_public_name_opens_and_says_what_it_is(name):
    assert getattr(npydata, name).__doc__.strip()


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'frobnicate'"):
        _ = npydata.frobnicate


def test_importing_npydata_imports_nothing_heavy():
    code = "import sys, npydata; print(sorted({'torch', 'numpy', 'matplotlib'} & set(sys.modules)))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


def test_the_library_needs_only_numpy_torch_and_safetensors():
    code = """
import sys
before = set(sys.modules)
import numpy, torch, torch.utils.data
from importlib.metadata import packages_distributions
known = {m.split(".")[0] for m in sys.modules}
import npydata
for name in npydata.__all__:
    getattr(npydata, name)
new = {m.split(".")[0] for m in sys.modules} - known - set(sys.stdlib_module_names)
print(sorted(new & set(packages_distributions())))
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "['npydata']"


def imports_of(path):
    """Yield the npydata modules that a module imports when it is itself imported."""
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("npydata."):
            yield node.module.split(".")[1]


@pytest.mark.parametrize("levels", [RANK, LOADER_RANK], ids=["files", "loader"])
def test_arrows_go_one_way(levels):
    rank = {name: k for k, names in enumerate(levels) for name in names}
    for name, level in rank.items():
        for imported in imports_of(ROOT / "npydata" / f"{name}.py"):
            assert rank[imported] < level, f"{name} imports {imported}"


def test_modules_import_no_circle():
    folder = ROOT / "npydata"
    graph = {}
    for path in folder.rglob("*.py"):
        room = path.relative_to(folder).with_suffix("").parts
        graph.setdefault(room[0], set()).update(set(imports_of(path)) - {room[0]})
    done = set()
    while remaining := graph.keys() - done:
        free = {room for room in remaining if graph[room] <= done}
        assert free, f"a circle among {sorted(remaining)}"
        done |= free


@pytest.mark.parametrize("room", CHECKPOINT_WING)
def test_the_checkpoint_wing_imports_nothing_of_the_data_wing(room):
    for path in (ROOT / "npydata" / room).glob("*.py"):
        assert set(imports_of(path)) - {room} <= CHECKPOINT_WING[room], path.name


@pytest.mark.parametrize("room", CHECKPOINT_WING)
def test_a_room_of_small_files_has_no_circle(room):
    graph = {}
    for path in (ROOT / "npydata" / room).glob("[!_]*.py"):
        nodes = [n for n in ast.parse(path.read_text()).body if isinstance(n, ast.ImportFrom)]
        inside = [n for n in nodes if (n.module or "").startswith(f"npydata.{room}")]
        graph[path.stem] = {
            name
            for node in inside
            for name in (node.module.split(".")[2:3] or [alias.name for alias in node.names])
        }
    done = set()
    while remaining := graph.keys() - done:
        free = {name for name in remaining if graph[name] <= done}
        assert free, f"a circle among {sorted(remaining)}"
        done |= free


def test_modules_are_short_enough_to_read():
    lengths = {p.name: len(p.read_text().splitlines()) for p in (ROOT / "npydata").rglob("*.py")}
    assert max(lengths.values()) <= 400, lengths


def test_the_figures_in_the_readme_are_the_saved_ones():
    sys.path.append(str(ROOT / "materials" / "results"))
    import render

    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert "<!-- figures: dataset -->" in readme
    assert "<!-- figures: loader -->" in readme
    assert "<!-- figures: checkpoint -->" in readme
    assert "<!-- figures: reader -->" in readme
    assert render.rendered(readme) == readme


def test_the_code_in_the_readme_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    code = re.findall(r"```python\n(.*?)```", readme, flags=re.S)
    names = {}
    for snippet in code:
        exec(compile(snippet, "README.md", "exec"), names)
    assert names["x"].shape == (32, 1024)
    assert names["inputs"].shape == (1024,)
