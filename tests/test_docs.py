"""The site: it builds offline, no link of it is broken, and the code on its pages runs."""

import json
import os
import re
import shutil
import subprocess
import sys
import types
from pathlib import Path

import nbformat
import numpy as np
import pytest
import yaml
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


def build(config, folder):
    """Build a site strictly, as `make docs` does, and without a network."""
    command = [sys.executable, "-c", WITHOUT_NETWORK, "build", "--strict"]
    command += ["--config-file", config, "--site-dir", folder]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("docs") / "site"
    run = build(ROOT / "materials" / "docs" / "mkdocs.yml", folder)
    assert run.returncode == 0, run.stderr
    return folder


def targets(page, attribute):
    """What a page names in one attribute of its elements, `id` or `href` or `src`."""
    return re.findall(rf'\s{attribute}="([^"]*)"', page.read_text(encoding="utf-8"))


def test_broken_links_fail_the_build(tmp_path):
    clone = tmp_path / "clone"
    shutil.copytree(ROOT / "materials" / "docs", clone / "materials" / "docs")
    (clone / "npydata").mkdir()
    (clone / "npydata" / "__init__.py").write_text("HOMES = {}")
    (clone / "npydata" / "errors.py").write_text('"""Errors."""')
    broken = ["gone.md", "#nowhere", "npydata/gone.py", "npydata/errors.py#npydata.errors.Gone"]
    (clone / "README.md").write_text("# x\n" + "\n".join(f"[a link]({link})" for link in broken))
    subprocess.run(["git", "init", "--quiet", clone], check=True)
    run = build(clone / "materials" / "docs" / "mkdocs.yml", tmp_path / "site")
    assert run.returncode != 0
    found = [line for line in run.stderr.splitlines() if "README.md" in line]
    assert all(any(link in line for line in found) for link in broken)


def test_every_public_name_has_a_place_in_the_reference(site):
    links = set(targets(site / "npydata" / "index.html", "href"))
    for name, home in npydata.HOMES.items():
        page, anchor = f"{home.replace('.', '/')}.html", f"npydata.{home}.{name}"
        assert f"{page}#{anchor}" in links
        assert anchor in targets(site / "npydata" / page, "id")


def test_a_class_shows_what_it_inherits(site):
    page = site / "npydata" / "dataset" / "datasets.html"
    assert "npydata.dataset.datasets.MmapDataset.fetch" in targets(page, "id")


def test_every_module_has_a_page(site):
    for path in (ROOT / "npydata").rglob("*.py"):
        page = site / path.relative_to(ROOT).with_suffix(".html")
        assert page.exists() or (page.stem == "__init__" and page.with_stem("index").exists())


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_shown_with_its_committed_pictures(site, path):
    cells = nbformat.read(path, as_version=4).cells
    outputs = [output for cell in cells for output in cell.get("outputs", [])]
    pictures = [output for output in outputs if "image/png" in output.get("data", {})]
    shown = targets(site / "notebooks" / f"{path.stem}.html", "src")
    assert len([name for name in shown if name.startswith(path.stem)]) == len(pictures)


def test_the_front_page_leads_to_every_part(site):
    wanted = {"npydata/index.html", "materials/tutorial/glossary.html",
              "materials/docs/arriving.html", "materials/results/figures.html"}  # fmt: skip
    wanted |= {f"notebooks/{path.stem}.html" for path in NOTEBOOKS}
    seen, ahead = set(), ["index.html"]
    while ahead:
        seen.add(page := ahead.pop())
        inside = (link.split("#")[0] for link in targets(site / page, "href") if ":" not in link)
        found = {str((site / page).parent.joinpath(link).resolve().relative_to(site.resolve()))
                 for link in inside if link.endswith(".html")}  # fmt: skip
        ahead += sorted((found & wanted) - seen - set(ahead))
    assert wanted <= seen


def test_no_page_loads_anything_from_elsewhere(site):
    for page in site.rglob("*.html"):
        html = page.read_text(encoding="utf-8")
        assert not re.findall(
            r"<(?:script|img|iframe|link)\b[^>]*\b(?:src|href)=.?(?:https?:)?//", html
        )


def test_every_page_can_be_searched_with_what_the_site_has_itself(site):
    entries = json.loads((site / "search" / "search_index.json").read_text("utf-8"))["docs"]
    found = {entry["location"].split("#")[0] or "index.html" for entry in entries}
    pages = {str(page.relative_to(site)) for page in site.rglob("*.html")}
    assert found == pages - {"404.html"}
    for page in pages:
        (worker,) = re.findall(r'"search": "([^"]+)"', (site / page).read_text("utf-8"))
        assert page == "404.html" or (site / page).parent.joinpath(worker).is_file()


def test_the_code_for_those_who_arrive_runs(arriving_files):
    blocks = re.findall(r"```python\n(.*?)```", ARRIVING.read_text(encoding="utf-8"), flags=re.S)
    names, batches = {}, []
    for block in blocks:
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


def test_megatron_s_first_sequence_is_our_first_document(arriving_files):
    corpus = npydata.open_tokens("corpus_text_document")
    first = np.fromfile("corpus_text_document.bin", np.uint16)[:60_000]
    assert np.array_equal(corpus.read(0, corpus.document_ends[0]), first)


def test_the_figures_for_those_who_arrive_are_the_saved_ones():
    page = ARRIVING.read_text(encoding="utf-8")
    assert {name for kind, name in render.BLOCK.findall(page) if kind == "gain"} == set(
        render.GAINS
    )
    assert render.rendered(page) == page, "run: python materials/results/render.py"


def test_no_figure_for_those_who_arrive_is_typed_by_hand():
    prose = render.BLOCK.sub("", ARRIVING.read_text(encoding="utf-8"))
    assert not re.search(r"\d\s*(Mtok|ms\b|MB/s|MiB|GB|%|x as fast|times as)", prose)


def test_the_devcontainer_calls_what_exists():
    described = json.loads((ROOT / ".devcontainer" / "devcontainer.json").read_text())
    program, target = described["postCreateCommand"].split()
    assert program == "make"
    dry_run = ["make", "--dry-run", "--always-make", "--directory", ROOT, target]
    run = subprocess.run(dry_run, capture_output=True, text=True, check=True)
    assert "pip install" in run.stdout
    assert described["forwardPorts"] == [8888]  # JupyterLab's own choice, which `make lab` leaves


def test_a_failing_notebook_fails_make_test_and_says_how_its_output_is_renewed(tmp_path):
    for file in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / file, tmp_path)
    python = tmp_path / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text('#!/bin/sh\ncase "$*" in *--nbval*) exit 1;; esac\n')
    python.chmod(0o755)
    (tmp_path / ".venv" / ".ready").touch()
    make = ["make", "--directory", tmp_path, "test"]
    run = subprocess.run(make, capture_output=True, text=True, check=False)
    assert run.returncode == 2
    assert "'make notebooks' writes it" in run.stdout


def test_no_link_of_a_notebook_leads_out_of_what_make_lab_serves(tmp_path):
    for file in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / file, tmp_path)
    shutil.copytree(ROOT / "notebooks", tmp_path / "notebooks")
    for folder in ("materials", "examples", "npydata"):
        (tmp_path / folder).symlink_to(ROOT / folder)
    make = ["make", "--directory", tmp_path]
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


def test_environment_yml_is_what_binder_takes():
    """Its builder wants a mapping, and installs after copying the repository for a local `-e .`."""
    described = yaml.safe_load((ROOT / "environment.yml").read_text())
    assert described["channels"] == ["conda-forge", "nodefaults"]
    *packages, last = described["dependencies"]
    assert last == {"pip": ["-e ."]}
    assert all(isinstance(package, str) for package in packages)
    assert {"pip", "jupyterlab>=4"} <= set(packages)
