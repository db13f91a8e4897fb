"""Run the code of the clinic's cases, and keep what it leaves behind as evidence.

    python materials/clinic/make_clinic.py        # all cases, some seconds each
    python materials/clinic/make_clinic.py 3      # one of them

Everything goes to build/clinic/case_N/.  Nothing here is made up: a case's own code is run.
"""

import shutil
import sys
from importlib import import_module
from pathlib import Path

HERE = Path(__file__).resolve().parent
BUILD = HERE.parents[1] / "build" / "clinic"
CASES = {1: "train", 2: "slim", 3: "experiment", 4: "train_two", 5: "keep_one"}


def make(case, folder):
    """Run one case in a folder of its own, emptied before."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    import_module(f"clinic.case_{case}.{CASES[case]}").reproduce(folder)


def main(asked):
    if not set(asked) <= {str(case) for case in CASES}:
        sys.exit(f"usage: make_clinic.py [{' '.join(map(str, CASES))}]")
    for case in map(int, asked or CASES):
        make(case, BUILD / f"case_{case}")
        print(f"case {case}: evidence in build/clinic/case_{case}/")


if __name__ == "__main__":
    sys.path.append(str(HERE.parent))  # so that cases find the course
    import torch

    torch.set_num_threads(1)  # small tensors; threads only get in each other's way
    main(sys.argv[1:])
