"""What a figure must be read with: processor, memory, kernel, versions, disk settings.

Never a host name, a user or a path: results are meant to be shared.
"""

import os
import platform
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from npydata.errors import NpyDataError
from npydata.system.page_cache import readahead_kb
from npydata.system.progress import human_bytes


def machine_facts(path: Path) -> dict[str, object]:
    """Describe this machine, and the disk below ``path``."""
    return {
        "cpu": cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "file_system": file_system(path),
        "readahead_kb": readahead_kb(path),
    }


def cpu_model() -> str:
    """Return the processor's name, or its kind where the kernel does not tell."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def file_system(path: Path) -> str:
    """Return the type of the file system that holds ``path``, such as ``ext4``."""
    device = path.stat().st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        before, _, after = line.partition(" - ")
        if before.split()[2] == wanted:
            return after.split()[0]
    return "unknown"


def machine_text(machine: Mapping[str, Any]) -> str:
    return (f"{machine['cpu']}, {machine['cores']} cores · "
            f"readahead {machine['readahead_kb']} KiB")  # fmt: skip


def require_space(folder: Path, size: int, options: str) -> None:
    """Raise before minutes of work if the disk cannot hold what will be made."""
    free = shutil.disk_usage(folder).free
    if free < size * 1.05:
        raise NpyDataError(f"{folder}: {human_bytes(free)} free, expected {human_bytes(size)}; "
                           f"choose {options}")  # fmt: skip
