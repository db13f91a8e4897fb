"""Save and load what is spread over many processes; see ``notebooks/09_scale_out``."""

from tutorial.kept.distributed.group import ShardingConfig as ShardingConfig
from tutorial.kept.distributed.load import load_distributed as load_distributed
