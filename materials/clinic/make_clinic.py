"""Run the code of the clinic's cases, and keep what it leaves behind as evidence.

    python materials/clinic/make_clinic.py

Everything goes to build/clinic/case_N/.  Nothing here is made up: a case's own code is run.
"""

import shutil
import sys
from pathlib import Path

MATERIALS = Path(__file__).resolve().parents[1]
sys.path.append(str(MATERIALS))  # so that cases find the course

from clinic.case_1 import slim  # noqa: E402
from clinic.case_2 import train_two  # noqa: E402
from clinic.case_3 import keep_one  # noqa: E402


def main(build=MATERIALS.parent / "build"):
    for number, case in enumerate((slim, train_two, keep_one), start=1):
        folder = build / "clinic" / f"case_{number}"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        case.reproduce(folder)
        print(f"case {number}: evidence in {folder}/")


if __name__ == "__main__":
    main()
