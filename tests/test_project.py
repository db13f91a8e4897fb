"""The project's own shape: one door, arrows one way, and files that say the same."""

import ast
import json
import re
import subprocess
import sys
import tomllib
from itertools import chain
from pathlib import Path
from types import SimpleNamespace

import pytest

import npydata

ROOT = Path(__file__).parent.parent
CONDA_NAMES = {"torch": "pytorch", "isal": "python-isal"}
MAY_IMPORT = {
    "errors": set(),
    "system": {"errors"},
    "dataset": {"errors", "system"},
    "loader": {"errors", "system", "dataset"},
    "reader": {"errors", "system"},
    "checkpointer": {"errors", "system", "reader"},
    "distributed": {"errors", "system", "reader", "checkpointer"},
    "integrations": {"errors", "checkpointer", "distributed"},
    "doctor": {"errors", "system"},
    "bench": {"errors", "system", "dataset", "loader", "reader", "checkpointer", "distributed"},
}
"""Each part of the package, and the parts below it; imports inside functions count as well."""

ON_TOP = {"cli", "__main__", "npydata"}
"""They may import everything."""


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
    """Open public names in a new interpreter, and return the packages that came with them.

    ISA-L comes where it is installed, in a millisecond: a later import could be caught by a fork.
    """
    code = f"""
import sys
import {known}
from importlib.metadata import packages_distributions
known = {{module.split(".")[0] for module in sys.modules}}
import npydata
for name in {names}:
    getattr(npydata, name)
new = {{module.split(".")[0] for module in sys.modules}} - known - set(sys.stdlib_module_names)
print(*sorted(new & set(packages_distributions()) - {{"isal"}}))
print("torch.distributed.checkpoint" in sys.modules)
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    packages, torchs_checkpoints = run.stdout.splitlines()
    return packages.split(), torchs_checkpoints == "True"


def test_the_library_needs_only_numpy_torch_and_safetensors():
    known = "numpy, torch.utils.data, torch.distributed.checkpoint"
    assert packages_imported_by(npydata.__all__, known)[0] == ["npydata"]


def test_no_name_of_the_door_imports_torchs_slow_checkpoint_package():
    names = list(npydata.HOMES)
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


def part_of(module):
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
    assert graph["npydata.dataset.datasets"] > {
        "npydata.dataset.token_file",
        "npydata.dataset.windows",
    }
    done = set()
    while remaining := graph.keys() - done:
        free = {module for module in remaining if graph[module] <= done}
        assert free, f"a circle among {sorted(remaining)}"
        done |= free


def test_every_part_has_its_place():
    parts = {part_of(module) for module in MODULES}
    assert parts == MAY_IMPORT.keys() | ON_TOP


def test_imports_go_down_only_also_inside_functions():
    arrows = {(part_of(module), part_of(imported)) for module, imported, _ in IMPORTS}
    upward = {
        (part, below)
        for part, below in arrows
        if part != below and part not in ON_TOP and below not in MAY_IMPORT[part] | {"npydata"}
    }
    assert upward == set()


def test_what_the_type_checker_sees_at_the_door_is_what_opens():
    tree = ast.parse((ROOT / "npydata" / "__init__.py").read_text(encoding="utf-8"))
    (seen,) = (node for node in tree.body if isinstance(node, ast.If))
    homes = {node.names[0].name: node.module.removeprefix("npydata.") for node in seen.body}
    assert homes == npydata.HOMES


def test_modules_are_short_enough_to_read():
    lengths = {p: len(p.read_text().splitlines()) for p in (ROOT / "npydata").rglob("*.py")}
    assert max(lengths.values()) <= 400, lengths


FIRST_LINES = {
    ".py": r'r?"""(.+)',
    ".md": r"# (.+)",
    ".css": r"/\* (.+)",
    **dict.fromkeys((".toml", ".yml", ".txt", ".gitignore", "Makefile", "run"), r"# (.+)"),
}
"""How a file may begin, by the ending of its name: a docstring, a heading or a comment."""


def committed_files():
    ask = ["git", "ls-files"]
    listed = subprocess.run(ask, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [path for path in map(ROOT.joinpath, listed.splitlines()) if path.is_file()]


def test_every_file_says_in_its_first_line_what_it_holds():
    silent = []
    for path in committed_files():
        form = FIRST_LINES.get(path.suffix or path.name)
        if form and not re.match(r"\W*\w+\W+\w+\W+\w+", first_line(path, form)):  # three words
            silent.append(str(path.relative_to(ROOT)))
    assert silent == []


def first_line(path, form):
    """What follows the mark of a docstring, heading or comment, below a line for the shell."""
    text = path.read_text(encoding="utf-8")
    found = re.match(rf"(?:#!.*\n)?{form}", text)
    return found[1] if found else ""


def test_the_figures_in_the_readme_are_the_saved_ones():
    sys.path.append(str(ROOT / "materials" / "results"))
    import render

    readme, figures, _ = (path.read_text(encoding="utf-8") for path in render.PAGES)
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
    assert names["first"] == 41


def test_the_code_in_the_readme_that_resumes_begins_at_a_first_start_and_takes_the_loader_up():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    resume = readme[readme.index("first = 1\nif latest :=") :].split("```")[0]
    asked = []
    found = SimpleNamespace(step=40, rng="rng", loader="place")
    names = {
        "latest_checkpoint": lambda run: None,
        "load_checkpoint": lambda latest: ("weights", "moments", found),
        "restore_rng": asked.append,
        **{name: SimpleNamespace(load_state_dict=asked.append)
           for name in ("model", "optimizer", "loader")},
    }  # fmt: skip
    exec(resume, names)
    assert (names["first"], asked) == (1, [])
    exec(resume, {**names, "latest_checkpoint": lambda run: run})
    assert asked == ["weights", "moments", "place", "rng"]
