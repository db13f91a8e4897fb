"""Your measuring, your model of the pipeline, and your choice of a setting."""

# ruff: noqa: F401
import time

import numpy as np

from npydata.loader.tuning import AS_GOOD, HEADROOM
from npydata.system.page_cache import AdviceBackoff
from tutorial.lesson_loader import AdaptivePrefetcher
from tutorial.pipeline import Pipeline, Trip, idle_share, resume


class MyPrefetcher(AdaptivePrefetcher):
    """Worker threads that fetch batches: one at first, and more while the consumer waits."""


class MyBackoff(AdviceBackoff):
    """When to give hints: at every call on cold pages, ever less on warm ones."""
