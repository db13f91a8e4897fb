"""The code on the frameworks' pages runs as it stands."""

from pathlib import Path

import numpy as np
import pytest
from pages import blocks

from npydata import write_tokens

PAGES = sorted((Path(__file__).parents[2] / "materials/docs/frameworks").glob("*.md"))
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_code_of_a_page_runs(page, tmp_path, monkeypatch):
    if page.stem != "own_loops":
        pytest.importorskip({"packed_rows": "transformers"}.get(page.stem, page.stem))
    monkeypatch.chdir(tmp_path)
    drawn = np.random.default_rng(1).integers(0, 512, 6000, dtype=np.uint16)
    write_tokens(tmp_path / "train.npy", [drawn])
    code = blocks(page)
    assert code
    exec(compile("\n".join(code), page.name, "exec"), {"__name__": "page"})
