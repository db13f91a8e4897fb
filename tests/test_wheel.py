"""The wheel in an empty environment: what someone has who installed npydata without extras.

The environment is a new one that holds the wheel and what its metadata requires, linked from where
the tests run; the checkout is not on its path.
"""

import shutil
import subprocess
import sys
import venv
import zipfile
from email import message_from_string
from importlib.metadata import distribution
from importlib.util import find_spec
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from pages import blocks

import npydata

ROOT = Path(__file__).parent.parent
NOT_FOR_A_WHEEL = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "build", "dist", "lab")
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
LEFT_OUT = ["IPython", "ipywidgets", "jupyterlab", "matplotlib", "pytest", "tokenizers", "tqdm"]

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(not find_spec("setuptools"), reason="setuptools builds the wheel"),
]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Build from a copy: setuptools leaves its work beside the source, and takes it up again."""
    folder = tmp_path_factory.mktemp("wheel")
    shutil.copytree(ROOT, folder / "source", ignore=NOT_FOR_A_WHEEL)
    options = ["--no-deps", "--no-build-isolation", "--wheel-dir", folder, folder / "source"]
    subprocess.run([*PIP, "wheel", *options], check=True)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def metadata(wheel):
    with zipfile.ZipFile(wheel) as file:
        (name,) = (name for name in file.namelist() if name.endswith(".dist-info/METADATA"))
        return message_from_string(file.read(name).decode())


@pytest.fixture(scope="module")
def environment(wheel, metadata, tmp_path_factory):
    """An environment's folder of commands."""
    folder = tmp_path_factory.mktemp("environment")
    venv.EnvBuilder(symlinks=True).create(folder)
    (packages,) = folder.glob("lib/python3*/site-packages")
    for name in required(metadata.get_all("Requires-Dist")):
        link(name, packages)
    into = [*PIP, "--python", folder / "bin" / "python"]
    # A checkout may be on the path: what is installed there does not count.
    subprocess.run(
        [*into, "install", "--ignore-installed", "--no-deps", "--no-index", wheel], check=True
    )
    subprocess.run([*into, "check"], check=True)
    return folder / "bin"


@pytest.fixture(scope="module")
def workplace(environment, tmp_path_factory):
    """A folder in which the README's Python code ran, without extras."""
    folder = tmp_path_factory.mktemp("work")
    code = "\n".join(blocks(ROOT / "README.md"))
    done = run(environment / "python", "-I", "-c", code, cwd=folder)
    assert (done.returncode, done.stderr) == (0, "")
    return folder


def required(requirements):
    """Return the distributions that requirements name, and all that those require, extras apart."""
    names, waiting = set(), list(requirements)
    while waiting:
        one = Requirement(waiting.pop())
        if one.name not in names and (not one.marker or one.marker.evaluate({"extra": ""})):
            names.add(one.name)
            waiting += distribution(one.name).requires or ()
    return names


def link(name, packages):
    """Link an installed distribution into a folder of packages."""
    files = distribution(name).files
    if files is None:
        pytest.skip(f"{name} was installed without a list of its files")
    for top in {file.parts[0] for file in files} - {"..", "__pycache__"}:
        if not (packages / top).exists():
            (packages / top).symlink_to(distribution(name).locate_file(top))


def run(*command, cwd):
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=280)


def test_the_wheel_holds_the_package_and_nothing_else(wheel):
    wanted = {str(path.relative_to(ROOT)) for path in (ROOT / "npydata").rglob("*.py")}
    with zipfile.ZipFile(wheel) as file:
        names = {name for name in file.namelist() if ".dist-info/" not in name}
    assert names == wanted | {"npydata/py.typed"}


def test_the_wheel_says_what_it_is(wheel, metadata):
    needed = [one for one in metadata.get_all("Requires-Dist") if "extra ==" not in one]
    assert {Requirement(one).name for one in needed} == {"numpy", "torch", "safetensors"}
    assert (metadata["Version"], metadata["License-Expression"]) == (npydata.__version__, "MIT")
    with zipfile.ZipFile(wheel) as file:
        assert any(name.endswith(".dist-info/licenses/LICENSE") for name in file.namelist())


def test_the_environment_is_without_extras(environment, tmp_path):
    code = f"from importlib.util import find_spec as f; print([*map(f, {LEFT_OUT})])"
    done = run(environment / "python", "-I", "-c", code, cwd=tmp_path)
    assert done.stdout.strip() == str([None] * len(LEFT_OUT))


def test_every_name_opens_from_the_wheel(environment, tmp_path):
    code = """
import npydata
for name in npydata.__all__:
    getattr(npydata, name)
print(npydata.__file__, npydata.__version__)
"""
    done = run(environment / "python", "-I", "-c", code, cwd=tmp_path)
    assert done.stderr == ""
    assert Path(done.stdout.split()[0]).is_relative_to(environment.parent)


@pytest.mark.parametrize(("arguments", "said"), [
    ("--help", "Every command has its own help"),
    ("inspect tokens.npy", "uint16"),
    ("inspect run/500", "weight"),
    ("convert run/500 model.safetensors", "4 tensors"),
    ("verify run", "resume from run/512"),
])  # fmt: skip
def test_the_command_line_works_without_extras(environment, workplace, arguments, said):
    done = run(environment / "npydata", *arguments.split(), cwd=workplace)
    assert done.returncode == 0, done.stderr
    assert said in done.stdout


def test_what_is_left_out_says_which_extra_it_is_in(environment, workplace):
    (workplace / "book.txt").write_text("Call me Ishmael.")
    before = set(workplace.iterdir())
    done = run(environment / "npydata", "prepare", "book.txt", "-o", "book.npy", cwd=workplace)
    assert done.returncode == 2
    wanted = "npydata: prepare needs the tokenizers package: pip install tokenizers\n"
    assert done.stderr == wanted
    assert set(workplace.iterdir()) == before


@pytest.mark.parametrize(("extra", "packages"), [
    ("prepare", {"tokenizers"}),
    ("notebooks", {"matplotlib"}),
])  # fmt: skip
def test_the_extras_that_messages_name_bring_what_was_missing(metadata, extra, packages):
    asked = [Requirement(one) for one in metadata.get_all("Requires-Dist")]
    inside = {one.name for one in asked if one.marker and one.marker.evaluate({"extra": extra})}
    assert packages <= inside
