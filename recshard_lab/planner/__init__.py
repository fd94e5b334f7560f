"""Predicts and chooses plans. It imports numpy and scipy, never torch, and launches no ranks.

Read `planner.py` (the class that users call), `parts.py` (its replaceable parts) and `workload.py` (the training step),
then the rooms: `model` (costs),
`search` (the choice), `answers` (questions about plans), `sweep` (many machines), `read` (files and modules).
"""

from recshard_lab.planner.access import AccessProfile as AccessProfile
from recshard_lab.planner.answers.answers import Explained as Explained
from recshard_lab.planner.answers.answers import PlanDiff as PlanDiff
from recshard_lab.planner.answers.answers import WhyNot as WhyNot
from recshard_lab.planner.model.cost import PHASES as PHASES
from recshard_lab.planner.model.cost import CostModel as CostModel
from recshard_lab.planner.model.estimate import Estimate as Estimate
from recshard_lab.planner.model.estimate import estimate as estimate
from recshard_lab.planner.model.memory import MEMORY_CATEGORIES as MEMORY_CATEGORIES
from recshard_lab.planner.model.parameter_server import ServerComparison as ServerComparison
from recshard_lab.planner.model.parameter_server import compare_servers as compare_servers
from recshard_lab.planner.model.tier_shares import TierShares as TierShares
from recshard_lab.planner.model.tier_shares import tier_shares as tier_shares
from recshard_lab.planner.model.torchrec_cost import TorchRecCostModel as TorchRecCostModel
from recshard_lab.planner.parts import FixedPercentageStorageReservation as FixedPercentageStorageReservation
from recshard_lab.planner.parts import HeuristicalStorageReservation as HeuristicalStorageReservation
from recshard_lab.planner.parts import PlanRequest as PlanRequest
from recshard_lab.planner.planner import EmbeddingShardingPlanner as EmbeddingShardingPlanner
from recshard_lab.planner.planner import plan as plan
from recshard_lab.planner.planner import tables_of as tables_of
from recshard_lab.planner.read.constraint_files import read_constraints as read_constraints
from recshard_lab.planner.read.table_files import TableFile as TableFile
from recshard_lab.planner.read.table_files import read_tables as read_tables
from recshard_lab.planner.sweep.mlperf_example import MLPERF_IDEAS as MLPERF_IDEAS
from recshard_lab.planner.sweep.mlperf_example import MLPERF_PUBLISHED_MS as MLPERF_PUBLISHED_MS
from recshard_lab.planner.sweep.mlperf_example import mlperf_dlrm_dcnv2_tables as mlperf_dlrm_dcnv2_tables
from recshard_lab.planner.sweep.mlperf_example import mlperf_dlrm_dcnv2_workload as mlperf_dlrm_dcnv2_workload
from recshard_lab.planner.sweep.mlperf_example import mlperf_example as mlperf_example
from recshard_lab.planner.sweep.mlperf_example import mlperf_step as mlperf_step
from recshard_lab.planner.sweep.points import Sweep as Sweep
from recshard_lab.planner.sweep.points import SweepPoint as SweepPoint
from recshard_lab.planner.sweep.trillions import trillion_example as trillion_example
from recshard_lab.planner.sweep.whatif import sweep as sweep
from recshard_lab.planner.workload import Workload as Workload
