"""The site: it builds offline, no link of it is broken, and the code on its pages runs."""

import json
import os
import re
import shutil
import subprocess
import sys
import types
from pathlib import Path

import numpy as np
import pytest
from pages import blocks
from token_builders import write

import npydata
from npydata import write_tokens

sys.path.append(str(Path(__file__).resolve().parents[1] / "materials" / "results"))
import render

pytestmark = pytest.mark.nightly

ROOT = Path(__file__).resolve().parents[1]
ARRIVING = ROOT / "materials" / "docs" / "arriving.md"
NOTEBOOKS = sorted((ROOT / "notebooks").glob("[0-9][0-9]_*.ipynb"))
WITHOUT_NETWORK = """
import runpy, socket, sys
def refuse(*_): raise OSError("the build asked for the network")
socket.socket.connect = socket.getaddrinfo = refuse
runpy.run_module("mkdocs", run_name="__main__", alter_sys=True)
"""
GUIDES = ("dataset", "loader", "reader", "checkpointer")


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The site, built strictly, as `make docs` does, and without a network."""
    folder = tmp_path_factory.mktemp("docs") / "site"
    command = [sys.executable, "-c", WITHOUT_NETWORK, "build", "--strict", "--site-dir", folder]
    command += ["--config-file", ROOT / "materials" / "docs" / "mkdocs.yml"]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    return folder


def targets(page, attribute):
    """What a page names in one attribute of its elements, `id` or `href` or `src`."""
    return re.findall(rf'\s{attribute}="([^"]*)"', page.read_text(encoding="utf-8"))


def test_every_public_name_has_a_line_and_a_description_in_the_reference(site):
    links = set(targets(site / "reference.html", "href"))
    found = set(targets(site / "reference.html", "id"))
    anchors = {f"npydata.{home}.{name}" for name, home in npydata.HOMES.items()}
    assert {f"#{anchor}" for anchor in anchors} <= links
    assert anchors <= found


def test_the_home_page_leads_to_every_lesson_and_guide(site):
    links = {link.split("#")[0] for link in targets(site / "index.html", "href")}
    assert {f"notebooks/{path.stem}.html" for path in NOTEBOOKS} <= links
    assert {f"materials/docs/{name}.html" for name in GUIDES} <= links


def test_no_page_loads_anything_from_elsewhere(site):
    for page in site.rglob("*.html"):
        html = page.read_text(encoding="utf-8")
        assert not re.findall(
            r"<(?:script|img|iframe|link)\b[^>]*\b(?:src|href)=.?(?:https?:)?//", html
        )


def test_the_search_finds_lessons_by_what_happens_in_them(site):
    entries = json.loads((site / "search" / "search_index.json").read_text("utf-8"))["docs"]
    found = {e["location"].split("#")[0] for e in entries if "torn" in e["text"].lower()}
    assert "notebooks/07_async_checkpointer.html" in found


@pytest.mark.parametrize("guide", GUIDES)
def test_the_code_of_a_guide_runs(guide, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {}
    for block in blocks(ROOT / "materials" / "docs" / f"{guide}.md"):
        exec(compile(block, f"{guide}.md", "exec"), names)
    assert names


def test_the_code_for_those_who_arrive_runs(arriving_files):
    names, batches = {}, []
    for block in blocks(ARRIVING):
        exec(compile(block, "arriving.md", "exec"), names)
        batches += [tuple(names.pop("x").shape)] if "x" in names else []
    assert batches == [(32, 1024), (32, 1024), (12, 256), (12, 256), (12, 256), (8, 1024)]
    assert names["step"] == 1000
    assert names["names"][:2] == ["model.weight", "model.bias"]


@pytest.fixture
def arriving_files(tmp_path, monkeypatch):
    """The files and the module that the page's blocks name."""
    monkeypatch.chdir(tmp_path)
    ids = np.arange(100_000) % 50_000
    write_tokens("train.npy", [ids], dtype="uint16")
    for split in ("train", "val"):
        ids.astype(np.uint16).tofile(f"{split}.bin")
    path = tmp_path / "corpus_text_document"
    write(path, "megatron", lengths=(60_000, 40_000), documents=(0, 1, 2), ids=ids)
    reader = types.ModuleType("megatron.core.datasets.indexed_dataset")
    reader.IndexedDataset = lambda prefix: [np.fromfile(f"{prefix}.bin", np.uint16)[:60_000]]
    monkeypatch.setitem(sys.modules, "megatron.core.datasets.indexed_dataset", reader)
    for parent in ("megatron", "megatron.core", "megatron.core.datasets"):
        monkeypatch.setitem(sys.modules, parent, types.ModuleType(parent))


def test_no_figure_for_those_who_arrive_is_typed_by_hand():
    prose = render.BLOCK.sub("", ARRIVING.read_text(encoding="utf-8"))
    assert not re.search(r"\d\s*(Mtok|ms\b|MB/s|MiB|GB|%|x as fast|times as)", prose)


def test_the_code_of_the_pages_passes_the_type_checker(tmp_path):
    pages = [ROOT / "README.md", *(ROOT / "materials" / "docs").rglob("*.md")]
    for page in pages:
        for number, block in enumerate(blocks(page)):
            (tmp_path / f"{page.stem}_{number}.py").write_text(block, encoding="utf-8")
    files = list(tmp_path.iterdir())
    assert len(files) > 20
    # Some blocks go on with names of the one before.
    options = ["--config-file=", "--ignore-missing-imports", "--disable-error-code=name-defined"]
    command = [sys.executable, "-m", "mypy", *options, *files]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout


def test_no_link_of_a_notebook_leads_out_of_what_make_lab_serves(tmp_path):
    for file in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / file, tmp_path)
    shutil.copytree(ROOT / "notebooks", tmp_path / "notebooks")
    for folder in ("materials", "examples", "npydata"):
        (tmp_path / folder).symlink_to(ROOT / folder)
    # In this environment, which is not to be set up again.
    make = ["make", "--directory", tmp_path, f"VENV={sys.prefix}", "-o", f"{sys.prefix}/.ready"]
    subprocess.run([*make, "lab-reset"], capture_output=True, check=True)
    dry_run = subprocess.run([*make, "-n", "lab"], capture_output=True, text=True, check=True)
    shell = r"cd (\S+) && \S+ -m jupyterlab .*--LabApp.default_url=/lab/tree/(\S+)"
    start, opened = re.search(shell, dry_run.stdout).groups()
    served, copies = tmp_path / start, (tmp_path / start / opened).parent
    assert len(list(copies.glob("*.ipynb"))) == len(NOTEBOOKS)
    for path in copies.glob("*.ipynb"):
        text = path.read_text(encoding="utf-8")
        for link in re.findall(r"\]\(([\w./]+\.(?:md|py|ipynb))\b", text):
            target = Path(os.path.normpath(copies / link))  # as text, as the browser takes it
            assert target.is_relative_to(served), f"{path.name}: {link}"
            assert target.exists(), f"{path.name}: {link}"
