"""The site: it builds offline, no link of it is broken, and the code on its pages runs."""

import json
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
from docs import figures, links, sources
from test_formats import write_megatron

import npydata
from npydata import write_tokens

ROOT = Path(__file__).resolve().parents[1]
ARRIVING = ROOT / "materials" / "docs" / "arriving.md"
NOTEBOOKS = sorted((ROOT / "notebooks").glob("[0-9][0-9]_*.ipynb"))
WITHOUT_NETWORK = """
import runpy, socket, sys
def refuse(*_): raise OSError("the build asked for the network")
socket.socket.connect = socket.getaddrinfo = refuse
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The site as `make docs` builds it, without a network."""
    folder = tmp_path_factory.mktemp("docs") / "site"
    script = str(ROOT / "materials" / "docs" / "build.py")
    command = [sys.executable, "-c", WITHOUT_NETWORK, script, str(folder)]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (folder / "index.html").exists(), run.stderr[-4000:]
    return folder


def test_no_link_of_the_site_is_broken(site):
    assert links.check(site).broken == []


@pytest.fixture(scope="module")
def door(site):
    return links.read_page(site / "api" / "npydata.html")


@pytest.mark.parametrize("name", npydata.__all__)
def test_every_public_name_has_a_place_in_the_reference(door, name):
    assert door.anchors[name] == 1


def test_a_public_class_shows_what_it_inherits(door):
    assert door.anchors["MmapDataset.fetch"] == 1


def test_every_module_has_a_page(site):
    modules = (ROOT / "npydata").rglob("[!_]*.py")
    wanted = {path.relative_to(ROOT).with_suffix(".html") for path in modules}
    assert wanted <= {path.relative_to(site / "api") for path in site.rglob("*.html")
                      if path.is_relative_to(site / "api")}  # fmt: skip


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_shown_with_its_committed_pictures(site, path):
    page = (site / "notebooks" / f"{path.stem}.html").read_text(encoding="utf-8")
    cells = nbformat.read(path, as_version=4).cells
    outputs = [output for cell in cells for output in cell.get("outputs", [])]
    pictures = [output for output in outputs if "image/png" in output.get("data", {})]
    assert page.count("data:image/png;base64") == len(pictures)


def test_a_taught_symbol_links_to_the_cell_that_builds_it(site):
    table = links.read_page(site / "materials" / "taught.html")
    cells = [link for link in table.links if "#cell-id=" in link]
    taught = (ROOT / "materials" / "taught.md").read_text(encoding="utf-8")
    assert len(cells) == taught.count("\n| `")


def test_the_front_page_leads_to_every_part(site):
    found = set(links.read_page(site / "index.html").links)
    wanted = {"api/npydata.html", "materials/tutorial/glossary.html", "materials/taught.html",
              "materials/docs/arriving.html", "materials/results/figures.html"}  # fmt: skip
    assert wanted | {f"notebooks/{path.stem}.html" for path in NOTEBOOKS} <= found


def test_a_page_that_goes_missing_is_found(site, tmp_path):
    copy = shutil.copytree(site, tmp_path / "site", ignore=shutil.ignore_patterns("glossary.html"))
    found = links.check(copy).broken
    assert "index.html: materials/tutorial/glossary.html: no such file" in found


LINKED = {
    "README.md": "index.html",
    "notebooks/01_memmap_dataset.ipynb": "notebooks/01_memmap_dataset.html",
    "npydata/windows.py": "api/npydata/windows.html",
    "npydata/lazy/__init__.py": "api/npydata/lazy.html",
    "npydata": "api/npydata.html",
    "materials/taught.md": "materials/taught.html",
    "materials/results/loader.png": "materials/results/loader.png",
    "materials/run_all.py": "materials/run_all.py.html",
    "LICENSE": "LICENSE.html",
    "notebooks": "notebooks.html",
}


@pytest.mark.parametrize("path", LINKED)
def test_a_link_to_a_file_leads_to_its_place_on_the_site(path):
    wanted = []
    html = sources.adapt(f'<a href="../{path}#top">', "tests/README.md", wanted.append)
    assert html == f'<a href="../{LINKED[path]}#top">'
    assert wanted == [path]


@pytest.mark.parametrize("link", ["gone.md", "https://x.org/a.md", "#top", "../../outside.md"])
def test_a_link_to_nothing_of_ours_is_left_as_it_is(link):
    html = f'<a href="{link}">'
    assert sources.adapt(html, "README.md", pytest.fail) == html


PAGE = '<h1 id="top">A</h1><a href="{}">x</a>'
GOOD = ["#top", "b.html", "b.html#there", "folder/", "data.json", "?search=x", "https://x.org/#no"]
BAD = {
    "#nowhere": "no such anchor",
    "c.html": "no such file",
    "b.html#gone": "no such anchor",
    "data.json#top": "no such anchor",
    "empty/": "no such file",
    "../outside.html": "leads out of the site",
}


@pytest.fixture
def small_site(tmp_path):
    """Two pages, a folder with one and one without, and a file beside the site."""
    root = tmp_path / "site"
    for folder in ("folder", "empty"):
        (root / folder).mkdir(parents=True)
    (root / "b.html").write_text('<p id="there">B</p>')
    (root / "folder" / "index.html").write_text("F")
    (root / "data.json").write_text("{}")
    (tmp_path / "outside.html").write_text("O")
    return root


@pytest.mark.parametrize("link", GOOD)
def test_a_link_that_leads_somewhere_passes(small_site, link):
    (small_site / "index.html").write_text(PAGE.format(link))
    assert links.check(small_site).broken == []


@pytest.mark.parametrize("link", BAD)
def test_a_broken_link_is_found(small_site, link):
    (small_site / "index.html").write_text(PAGE.format(link))
    assert links.check(small_site).broken == [f"index.html: {link}: {BAD[link]}"]


def test_links_that_leave_the_site_are_listed(small_site):
    (small_site / "index.html").write_text(PAGE.format("https://example.org/a"))
    assert links.check(small_site).external == ["https://example.org/a"]


@pytest.mark.parametrize("tag", ['<script src="{}">', '<link href="{}">', '<img src="{}">'])
def test_a_page_may_load_nothing_from_elsewhere(small_site, tag):
    (small_site / "index.html").write_text(tag.format("https://example.org/a.js"))
    assert "loaded from elsewhere" in links.check(small_site).broken[0]


def test_an_anchor_that_is_there_twice_is_found(small_site):
    (small_site / "index.html").write_text('<p id="a"></p><p id="a"></p>')
    assert links.check(small_site).broken == ["index.html: two anchors #a"]


def test_a_broken_link_fails_the_build(tmp_path):
    code = """
import sys
from docs import build, links
build.build = lambda folder: links.Report(1, 1, ["index.html: gone.html: no such file"], [])
sys.exit(build.main())
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True,
                         cwd=ROOT / "materials", check=False)  # fmt: skip
    assert run.returncode == 1
    assert "broken: index.html: gone.html: no such file" in run.stderr


def test_a_folder_with_other_files_is_left_alone(tmp_path):
    mine = tmp_path / "mine.txt"
    mine.write_text("keep")
    script = ROOT / "materials" / "docs" / "build.py"
    run = subprocess.run([sys.executable, script, tmp_path], capture_output=True, text=True,
                         check=False)  # fmt: skip
    assert run.returncode == 1
    assert "holds other files" in run.stderr
    assert mine.read_text() == "keep"


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
    monkeypatch.setattr("test_formats.IDS", ids)
    write_megatron(tmp_path / "corpus_text_document", (60_000, 40_000), (0, 1, 2))
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
    assert set(figures.BLOCK.findall(page)) == set(figures.GAINS)
    assert figures.rendered(page) == page, "run: python materials/docs/figures.py"


def test_no_figure_for_those_who_arrive_is_typed_by_hand():
    prose = figures.BLOCK.sub("", ARRIVING.read_text(encoding="utf-8"))
    assert not re.search(r"\d\s*(Mtok|ms\b|MB/s|MiB|GB|%|x as fast|times as)", prose)


def test_the_devcontainer_calls_what_exists():
    described = json.loads((ROOT / ".devcontainer" / "devcontainer.json").read_text())
    program, target = described["postCreateCommand"].split()
    assert program == "make"
    dry_run = ["make", "--dry-run", "--always-make", "--directory", ROOT, target]
    run = subprocess.run(dry_run, capture_output=True, text=True, check=True)
    assert "pip install" in run.stdout
    assert described["forwardPorts"] == [8888]  # JupyterLab's own choice, which `make lab` leaves


def test_environment_yml_is_what_binder_takes():
    """Its builder wants a mapping, and installs after copying the repository for a local `-e .`."""
    described = yaml.safe_load((ROOT / "environment.yml").read_text())
    assert described["channels"] == ["conda-forge", "nodefaults"]
    *packages, last = described["dependencies"]
    assert last == {"pip": ["-e ."]}
    assert all(isinstance(package, str) for package in packages)
    assert {"pip", "jupyterlab>=4"} <= set(packages)


def test_make_has_a_target_for_the_site():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert "materials/docs/build.py" in makefile
    assert "docs" in re.search(r"\.PHONY: (.*)", makefile)[1].split()
