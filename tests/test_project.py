"""The project's own shape: one door, arrows one way, and files that say the same."""

import ast
import json
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
LEVELS = [
    {"npydata", "errors", "atomic", "pages", "progress"},
    {"formats", "windows", "text", "recognise", "handover", "device", "lazy"},
    {"access", "schedule", "buffers", "checkpoint", "inspect_checkpoint"},
    {"tokens", "batches", "iterator", "distributed"},
    {"fingerprint", "prepare", "inspect_tokens"},
    {"dataset"},
    {"loader", "pipeline"},
    {"throughput"},
    {"bench"},
    {"cli"},
    {"__main__"},
]
"""Every file and room of the package: each imports from the levels above it alone."""

UPWARD_WHEN_CALLED = {("checkpoint", "distributed"), ("throughput", "bench")}
"""Imports inside functions that go against the arrows, because a method leads to the next room."""

CHECKPOINT_WING = {"lazy", "checkpoint", "inspect_checkpoint", "distributed"}
BOTH_WINGS_USE = LEVELS[0]
ON_TOP = {"bench", "cli", "__main__"}


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


def packages_imported_by(names, known):
    """Open public names in a new interpreter, and return the packages that came with them."""
    code = f"""
import sys
import {known}
from importlib.metadata import packages_distributions
known = {{module.split(".")[0] for module in sys.modules}}
import npydata
for name in {names}:
    getattr(npydata, name)
new = {{module.split(".")[0] for module in sys.modules}} - known - set(sys.stdlib_module_names)
print(*sorted(new & set(packages_distributions())))
print("torch.distributed.checkpoint" in sys.modules)
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    packages, torchs_checkpoints = run.stdout.splitlines()
    return packages.split(), torchs_checkpoints == "True"


def test_the_library_needs_only_numpy_torch_and_safetensors():
    known = "numpy, torch.utils.data, torch.distributed.checkpoint"
    assert packages_imported_by(npydata.__all__, known)[0] == ["npydata"]


def test_only_what_is_distributed_imports_torchs_slow_checkpoint_package():
    names = [name for name, home in npydata.HOMES.items() if not home.startswith("distributed")]
    assert packages_imported_by(names, "numpy, torch.utils.data") == (["npydata"], False)


def module_names():
    """Return the package's modules by their full names."""
    paths = (ROOT / "npydata").rglob("*.py")
    parts = {path: path.relative_to(ROOT).with_suffix("").parts for path in paths}
    return {
        ".".join(part for part in names if part != "__init__"): path
        for path, names in parts.items()
    }


def import_statements(node, called=False):
    """Yield import statements, and whether they run only when a function is called."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING":
            continue
        inside = called or isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)
        if isinstance(child, ast.Import | ast.ImportFrom):
            yield child, inside
        yield from import_statements(child, inside)


def imports_of(code, modules):
    """Yield the package's modules that code imports, and whether only when it is called."""
    for statement, called in import_statements(ast.parse(code)):
        names = [alias.name for alias in statement.names]
        if isinstance(statement, ast.ImportFrom):
            assert not statement.level, "a relative import, which this test does not follow"
            inside = [f"{statement.module}.{name}" for name in names]
            names = [name if name in modules else statement.module for name in inside]
        yield from ((name, called) for name in names if name.split(".")[0] == "npydata")


def room_of(module):
    return module.split(".")[1] if "." in module else module


MODULES = module_names()
IMPORTS = [
    (module, imported, called)
    for module, path in MODULES.items()
    for imported, called in imports_of(path.read_text(encoding="utf-8"), MODULES)
]


@pytest.mark.parametrize(("code", "found"), [
    ("import npydata.errors", {("npydata.errors", False)}),
    ("from npydata import errors", {("npydata.errors", False)}),
    ("from npydata import open_tokens", {("npydata", False)}),
    ("from npydata.errors import NpyDataError", {("npydata.errors", False)}),
    ("if x:\n try:\n  import npydata.errors\n finally: pass", {("npydata.errors", False)}),
    ("class A:\n import npydata.errors", {("npydata.errors", False)}),
    ("class A:\n def f():\n  import npydata.errors", {("npydata.errors", True)}),
    ("if TYPE_CHECKING:\n import npydata.errors", set()),
    ("import json\nfrom numpy import typing", set()),
])  # fmt: skip
def test_imports_are_found_wherever_they_stand(code, found):
    assert set(imports_of(code, MODULES)) == found


def test_modules_import_no_circle():
    graph = {module: set() for module in MODULES}
    for module, imported, called in IMPORTS:
        if not called:
            graph[module].add(imported)
    assert graph["npydata.dataset"] > {"npydata.tokens", "npydata.windows"}
    done = set()
    while remaining := graph.keys() - done:
        free = {module for module in remaining if graph[module] <= done}
        assert free, f"a circle among {sorted(remaining)}"
        done |= free


def test_every_room_has_its_level():
    rooms = [room for level in LEVELS for room in level]
    assert sorted(rooms) == sorted({room_of(module) for module in MODULES})


def test_arrows_go_one_way():
    level = {room: number for number, rooms in enumerate(LEVELS) for room in rooms}
    upward = {False: set(), True: set()}
    for module, imported, called in IMPORTS:
        arrow = room_of(module), room_of(imported)
        if arrow[0] != arrow[1] and level[arrow[1]] >= level[arrow[0]]:
            upward[called].add(arrow)
    assert upward == {False: set(), True: UPWARD_WHEN_CALLED}


def test_the_two_wings_do_not_import_each_other():
    for module, imported, _ in IMPORTS:
        arrow = {room_of(module), room_of(imported)}
        if not arrow & (BOTH_WINGS_USE | ON_TOP) and len(arrow & CHECKPOINT_WING) == 1:
            assert len(arrow) == 1, f"{module} imports {imported}"


def test_what_the_type_checker_sees_at_the_door_is_what_opens():
    tree = ast.parse((ROOT / "npydata" / "__init__.py").read_text(encoding="utf-8"))
    (seen,) = (node for node in tree.body if isinstance(node, ast.If))
    homes = {node.names[0].name: node.module.removeprefix("npydata.") for node in seen.body}
    assert homes == npydata.HOMES


def test_modules_are_short_enough_to_read():
    lengths = {p.name: len(p.read_text().splitlines()) for p in (ROOT / "npydata").rglob("*.py")}
    assert max(lengths.values()) <= 400, lengths


def test_the_figures_in_the_readme_are_the_saved_ones():
    sys.path.append(str(ROOT / "materials" / "results"))
    import render

    readme, figures = (path.read_text(encoding="utf-8") for path in render.PAGES)
    assert "<!-- summary -->" in readme
    for report in (ROOT / "materials" / "results").glob("*.json"):
        if "verdicts" in json.loads(report.read_text(encoding="utf-8")):
            assert f"<!-- figures: {report.stem} -->" in figures
    for path in render.PAGES:
        page = path.read_text(encoding="utf-8")
        assert render.rendered(page) == page, "run: python materials/results/render.py"


def test_the_code_in_the_readme_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    code = re.findall(r"```python\n(.*?)```", readme, flags=re.S)
    names = {}
    for snippet in code:
        exec(compile(snippet, "README.md", "exec"), names)
    assert names["x"].shape == (32, 1024)
    assert names["inputs"].shape == (1024,)
