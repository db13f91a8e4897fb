"""Your training: what is taken down of a run, how it goes on, and what signals ask for."""

# ruff: noqa: F401
import random
import signal
import sys
from pathlib import Path

import numpy as np
import torch

import npydata
from npydata import TrainingState
from tutorial.kept.checkpointer.training_state import capture_on_accelerators

sys.path.append(str(Path(npydata.__file__).parents[1] / "examples"))
from train import Asked, require_same


class MyAsked(Asked):
    """What signals ask for: `save` and `end`, both False at first, and `listen` are given."""
