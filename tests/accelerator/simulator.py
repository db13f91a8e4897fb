"""A simulated accelerator, ``sim``: build it, load it into this process, turn it and read it.

See ``README.md`` beside this file. Loading registers the device with torch for the whole process,
so the tests on it have a process of their own: ``pytest -m accelerator``.
"""

import ctypes
import hashlib
import os
import shutil
import types
from collections import Counter
from contextlib import contextmanager
from pathlib import Path

import torch

HERE = Path(__file__).parent
SOURCES = sorted((HERE / "sim").glob("*.cpp"))
BUILDS = Path(os.environ.get("NPYDATA_SIM_BUILDS", HERE.parents[1] / "build" / "accelerator"))
DEVICES = 2


def missing_tools():
    """Return why the simulator can't be built here, or nothing."""
    missing = [tool for tool in (os.environ.get("CXX", "g++"), "ninja") if not shutil.which(tool)]
    return f"no simulated accelerator: needs {' and '.join(missing)}" if missing else ""


def library():
    """Return where the library is, or will be built: a place for each state of source and torch."""
    content = b"".join(path.read_bytes() for path in sorted((HERE / "sim").iterdir()))
    digest = hashlib.sha256(content + torch.__version__.encode()).hexdigest()[:16]
    return BUILDS / digest / "npydata_sim.so"


def built():
    """Return the library's path; it is built once."""
    path = library()
    if not path.exists():
        from torch.utils import cpp_extension

        folder = path.parent
        making = BUILDS / f"{folder.name}-{os.getpid()}"
        making.mkdir(parents=True)
        cpp_extension.load(
            "npydata_sim",
            [str(path) for path in SOURCES],
            is_python_module=False,
            build_directory=str(making),
            extra_cflags=["-O1", "-w"],
        )
        try:
            making.rename(folder)  # another process may have been faster
        except OSError:
            shutil.rmtree(making)
    return path


class Simulator:
    """What a test turns and reads."""

    def __init__(self, library):
        self._library = library
        library.sim_report.restype = ctypes.c_char_p
        library.sim_live_bytes.restype = ctypes.c_size_t
        library.sim_random_state.restype = ctypes.c_uint64

    def seed(self, seed):
        """Choose the adversary: how early, how late, and in which order operations run."""
        self._library.sim_seed(ctypes.c_uint64(seed))

    def fail_next(self, name):
        """Make the next operation with this in its name fail on the device."""
        self._library.sim_fail_next(name.encode())

    @contextmanager
    def capacity(self, nbytes):
        """Give the first device no more memory than this."""
        self._library.sim_capacity(0, ctypes.c_size_t(nbytes))
        yield
        self._library.sim_capacity(0, ctypes.c_size_t(0))

    def live_bytes(self):
        """Return how many bytes of the first device's memory are handed out, in whole pages."""
        return self._library.sim_live_bytes(0)

    def reset_counts(self):
        """Count host waits and operations from here on."""
        self._library.sim_reset_counts()

    def host_waits(self):
        """Return how often the host waited, by what for."""
        return self._report("wait")

    def executed(self):
        """Return how many operations ran, by name."""
        return self._report("ran")

    def _report(self, wanted):
        lines = self._library.sim_report().decode().splitlines()
        return Counter(
            {
                what: int(n)
                for kind, what, n in (line.split("\t") for line in lines)
                if kind == wanted
            }
        )


class HostMemory:
    """``torch.sim.cudart()``: pins memory that was allocated elsewhere, as CUDA's runtime does."""

    def __init__(self, library):
        self._library = library
        self.pinned = {}

    def cudaHostRegister(self, pointer, nbytes, flags):  # noqa: N802
        if any(p < pointer + nbytes and pointer < p + n for p, n in self.pinned.items()):
            return 712  # cudaErrorHostMemoryAlreadyRegistered
        self.pinned[pointer] = nbytes
        self._library.sim_pin(ctypes.c_void_p(pointer), ctypes.c_size_t(nbytes))
        return 0

    def cudaHostUnregister(self, pointer):  # noqa: N802
        del self.pinned[pointer]
        return self._library.sim_unpin(ctypes.c_void_p(pointer))


def device_module(library, simulator):
    """Return ``torch.sim``."""
    module = types.ModuleType("torch.sim")
    host = HostMemory(library)

    def index(device):
        device = torch.device(device) if isinstance(device, str) else device
        return device.index or 0 if isinstance(device, torch.device) else device

    def get_rng_state(device=0):
        state = library.sim_random_state(index(device))
        return torch.frombuffer(bytearray(state.to_bytes(8, "little")), dtype=torch.uint8)

    def set_rng_state(state, device=0):
        number = int.from_bytes(bytes(state.tolist()), "little")
        library.sim_set_random_state(index(device), ctypes.c_uint64(number))

    def manual_seed_all(seed):
        for device in range(DEVICES):
            library.sim_set_random_state(device, ctypes.c_uint64(seed))

    module.is_available = module.is_initialized = lambda: True
    module._is_in_bad_fork = lambda: False
    module.device_count = lambda: DEVICES
    module.current_device = torch.accelerator.current_device_index
    module.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]
    module.cudart = lambda: host
    module.get_rng_state, module.set_rng_state = get_rng_state, set_rng_state
    module.get_rng_state_all = lambda: [get_rng_state(device) for device in range(DEVICES)]
    module.manual_seed_all, module.simulator = manual_seed_all, simulator
    return module


def load():
    """Register the device with torch, once; return its :class:`Simulator`."""
    if hasattr(torch, "sim"):
        return torch.sim.simulator
    path = str(built())
    torch.ops.load_library(path)
    library = ctypes.CDLL(path)
    simulator = Simulator(library)
    torch.utils.rename_privateuse1_backend("sim")
    torch._register_device_module("sim", device_module(library, simulator))
    return simulator
