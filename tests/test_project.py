"""The project's own shape: one door, arrows one way, and files that say the same."""

import ast
import json
import re
import shutil
import sys
import tomllib
from itertools import chain
from pathlib import Path

import pytest
from children import run_child
from pages import blocks

import npydata

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
ASKED_FOR = [*PROJECT["dependencies"], *chain(*PROJECT["optional-dependencies"].values())]
CONDA_NAMES = {"torch": "pytorch", "isal": "python-isal"}


def requirement_names(requirements):
    parsed = (re.fullmatch(r"([\w-]+)(?:\[\w+\])?(.*)", r).groups() for r in requirements)
    return {f"{CONDA_NAMES.get(name, name)}{version}" for name, version in parsed}


def test_environment_yml_asks_for_what_pyproject_asks_for():
    wanted = requirement_names(ASKED_FOR)
    wanted |= {"python" + PROJECT["requires-python"]}
    lines = (ROOT / "environment.yml").read_text().split("dependencies:")[1].splitlines()
    listed = {line.strip("- ") for line in lines if line.startswith("  - ")}
    assert listed - {"pip", "pip:"} == wanted
    assert "pip" in listed


def test_constraints_pin_everything_pyproject_asks_for():
    names = {re.match(r"[\w-]+", asked)[0] for asked in ASKED_FOR}
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = {line.split("==")[0] for line in lines if "==" in line}
    assert names <= pinned


def test_the_version_is_stated_once():
    assert npydata.__version__ == PROJECT["version"]


@pytest.mark.parametrize("name", npydata.__all__)
def test_every_public_name_opens_and_says_what_it_is(name):
    assert getattr(npydata, name).__doc__.strip()


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'frobnicate'"):
        _ = npydata.frobnicate


def test_importing_npydata_imports_nothing_heavy():
    code = "import sys, npydata; print(sorted({'torch', 'numpy', 'matplotlib'} & set(sys.modules)))"
    run = run_child(code)
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
    run = run_child(code)
    packages, torchs_checkpoints = run.stdout.splitlines()
    return packages.split(), torchs_checkpoints == "True"


def test_the_library_needs_only_numpy_torch_and_safetensors():
    known = "numpy, torch.utils.data, torch.distributed.checkpoint"
    assert packages_imported_by(npydata.__all__, known)[0] == ["npydata"]


def test_no_name_of_the_door_imports_torchs_slow_checkpoint_package():
    names = list(npydata.HOMES)
    assert packages_imported_by(names, "numpy, torch.utils.data") == (["npydata"], False)


def test_what_the_type_checker_sees_at_the_door_is_what_opens():
    tree = ast.parse((ROOT / "npydata" / "__init__.py").read_text(encoding="utf-8"))
    (seen,) = (node for node in tree.body if isinstance(node, ast.If))
    homes = {node.names[0].name: node.module.removeprefix("npydata.") for node in seen.body}
    assert homes == npydata.HOMES


def test_the_figures_in_the_readme_are_the_saved_ones():
    sys.path.append(str(ROOT / "materials" / "results"))
    import render

    readme, figures, *_ = (path.read_text(encoding="utf-8") for path in render.PAGES)
    assert "<!-- summary: short -->" in readme
    for report in (ROOT / "materials" / "results").glob("*.json"):
        if "verdicts" in json.loads(report.read_text(encoding="utf-8")):
            assert f"<!-- figures: {report.stem} -->" in figures
    for path in render.PAGES:
        page = path.read_text(encoding="utf-8")
        assert render.rendered(page) == page, "run: python materials/results/render.py"


def test_no_page_holds_the_markers_of_a_merge():
    for page in [*ROOT.glob("*.md"), *(ROOT / "materials").rglob("*.md")]:
        assert not re.search("^(<<<<<<<|>>>>>>>) ", page.read_text(encoding="utf-8"), re.M), page


def test_the_code_in_the_readme_trains_and_goes_on(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (code,) = blocks(ROOT / "README.md")
    # A smaller vocabulary: as many steps, each in a fraction of the time.
    code = code.replace("50_000", "5_000")
    run = tmp_path / "run"
    for latest in (None, run / "500", run / "512"):
        names = {}
        exec(compile(code, "README.md", "exec"), names)
        assert (names["latest"] and names["latest"].resolve(), names["step"]) == (latest, 512)
        if latest is None:
            shutil.rmtree(run / "512")  # as if killed before the last save
