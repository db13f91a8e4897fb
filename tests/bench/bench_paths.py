"""Where the benchmarks lie, for the tests that import them."""

import sys
from pathlib import Path

BENCH = Path(__file__).resolve().parents[2] / "materials" / "bench"
sys.path[:0] = [str(BENCH), str(BENCH / "survival")]
