"""Processes that are the ranks of a group, and what they save and load."""

from ranks.nursery import report as report
from ranks.running import PATIENCE as PATIENCE
from ranks.running import Ranks as Ranks
from ranks.running import on_ranks as on_ranks
