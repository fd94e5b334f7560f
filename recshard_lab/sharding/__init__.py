"""A sharding plan is a tiling: every table is split into shards, rectangles of rows x columns on ranks.

In walking order: `plan/` (what a plan is), `schemes/` (how tables are split), `hardware/` (what plans run on),
`export/` (text and scripts). Read `plan/sharding_plan.py` first, then one file of `schemes/`, then `plan/tiling.py`.
"""

from recshard_lab.sharding.hardware.device_profile import DeviceProfile as DeviceProfile
from recshard_lab.sharding.hardware.presets import preset_names as preset_names
from recshard_lab.sharding.hardware.presets import preset_table as preset_table
from recshard_lab.sharding.hardware.topology import Topology as Topology
from recshard_lab.sharding.plan.cache_params import CacheParams as CacheParams
from recshard_lab.sharding.plan.constraints import ParameterConstraints as ParameterConstraints
from recshard_lab.sharding.plan.row_shares import RowShares as RowShares
from recshard_lab.sharding.plan.sharding_plan import EmbeddingModuleShardingPlan as EmbeddingModuleShardingPlan
from recshard_lab.sharding.plan.sharding_plan import ParameterSharding as ParameterSharding
from recshard_lab.sharding.plan.sharding_plan import ShardingPlan as ShardingPlan
from recshard_lab.sharding.plan.tiling import Rect as Rect
from recshard_lab.sharding.plan.tiling import find_fault as find_fault
from recshard_lab.sharding.plan.tiling import intersect as intersect
from recshard_lab.sharding.plan.types import ROUTES as ROUTES
from recshard_lab.sharding.plan.types import EmbeddingComputeKernel as EmbeddingComputeKernel
from recshard_lab.sharding.plan.types import PlanError as PlanError
from recshard_lab.sharding.plan.types import Shard as Shard
from recshard_lab.sharding.plan.types import ShardingType as ShardingType
from recshard_lab.sharding.schemes import Proposal as Proposal
from recshard_lab.sharding.schemes import Scheme as Scheme
from recshard_lab.sharding.schemes import register_scheme as register_scheme
from recshard_lab.sharding.schemes import scheme_named as scheme_named
from recshard_lab.sharding.schemes import scheme_names as scheme_names
from recshard_lab.sharding.schemes import unregister_scheme as unregister_scheme
from recshard_lab.sharding.schemes import usable_ranks as usable_ranks
from recshard_lab.sharding.schemes.generators import ParameterShardingGenerator as ParameterShardingGenerator
from recshard_lab.sharding.schemes.generators import column_wise as column_wise
from recshard_lab.sharding.schemes.generators import data_parallel as data_parallel
from recshard_lab.sharding.schemes.generators import flex_shard as flex_shard
from recshard_lab.sharding.schemes.generators import grid_shard as grid_shard
from recshard_lab.sharding.schemes.generators import row_wise as row_wise
from recshard_lab.sharding.schemes.generators import table_column_wise as table_column_wise
from recshard_lab.sharding.schemes.generators import table_row_wise as table_row_wise
from recshard_lab.sharding.schemes.generators import table_wise as table_wise
from recshard_lab.sharding.schemes.generators import tiling as tiling
from recshard_lab.sharding.schemes.module_plan import Found as Found
from recshard_lab.sharding.schemes.module_plan import apply_to_all as apply_to_all
from recshard_lab.sharding.schemes.module_plan import configs_of as configs_of
from recshard_lab.sharding.schemes.module_plan import construct_module_sharding_plan as construct_module_sharding_plan
from recshard_lab.sharding.schemes.module_plan import find_collections as find_collections
from recshard_lab.sharding.schemes.module_plan import running_topology as running_topology
from recshard_lab.sharding.schemes.module_plan import running_world_size as running_world_size
from recshard_lab.sharding.schemes.module_plan import sharder_of as sharder_of
