"""The parts that lessons build, as plain code, until the lessons are rewritten.

The checkpointer of lessons 07 to 09 has its public names here.
"""

from importlib import import_module

import npydata

HOMES = {
    "AsyncCheckpointer": "distributed.checkpointer",
    "TrainingState": "checkpointer.training_state",
    "capture_rng": "checkpointer.training_state",
    "restore_rng": "checkpointer.training_state",
    "save_checkpoint": "checkpointer.checkpointer",
    "latest_checkpoint": "checkpointer.load",
    "load_checkpoint": "checkpointer.load",
    "verify_checkpoint": "checkpointer.load",
    "ShardingConfig": "distributed.group",
    "load_distributed": "distributed.load",
}


def __getattr__(name):
    if name in HOMES:
        return getattr(import_module(f"tutorial.kept.{HOMES[name]}"), name)
    return getattr(npydata, name)
