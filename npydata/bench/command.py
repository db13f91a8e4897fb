"""What every bench does around its measurements: refuse bad outputs first, write them last."""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from npydata.bench.plot import Layout, draw, require_plotting
from npydata.bench.report import write_json
from npydata.errors import NpyDataError


def run_bench(
    args: argparse.Namespace, measure: Callable[[], dict[str, Any]], layout: Layout | None = None
) -> int:
    """Measure, and write what was asked for; a missed target is not an error."""
    if args.plot:
        require_plotting(args.plot)
    require_folders(args.json, args.plot)
    result = measure()
    if args.json:
        write_json(args.json, result)
    if args.plot:
        draw(result, args.plot, layout or Layout())
    return 0


def require_folders(*outputs: Path | None) -> None:
    """Raise before minutes of work if a result could not be written afterwards."""
    for path in outputs:
        if path and not path.absolute().parent.is_dir():
            raise NpyDataError(f"{path}: its folder does not exist")
