"""The system's tools that some faults need: what is missing, and how to get it."""

import os
import shutil
import subprocess
from functools import cache

PACKAGES = {"strace": "strace", "mkfs.ext4": "e2fsprogs", "mkfs.xfs": "xfsprogs"}
"""Tools, and the packages they come in."""


def not_installed(tool):
    """Return that a tool is not here, and how to get it; or an empty text."""
    if shutil.which(tool):
        return ""
    return f"{tool} is not installed (apt-get install {PACKAGES[tool]})"


def install_missing():
    """Install what is missing if that is possible, and name what is missing still."""
    missing = [package for tool, package in PACKAGES.items() if not_installed(tool)]
    if missing and not os.geteuid() and shutil.which("apt-get"):
        print(f"[nightly] installing {', '.join(missing)}", flush=True)
        subprocess.run(["apt-get", "install", "--yes", "-qq", *missing], capture_output=True)
    lacking = [*filter(None, map(not_installed, PACKAGES))]
    lacking += ["mounting disks needs root"] if os.geteuid() else []
    for why in lacking:
        print(f"[nightly] {why}: some tests are left out, and counted at the end")


@cache
def cannot_trace():
    """Return why faults can't be injected here, or an empty text."""
    if why := not_installed("strace"):
        return why
    done = subprocess.run(
        ["strace", "-e", "inject=getppid:retval=7", "true"], capture_output=True, text=True
    )
    return "" if done.returncode == 0 else f"strace can't trace here: {done.stderr[-200:]}"


if __name__ == "__main__":
    install_missing()
