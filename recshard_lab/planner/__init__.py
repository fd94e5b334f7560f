"""Predicts and chooses plans: numpy only (`exact.py` also scipy), nothing launched.

Read `cost.py` first (what a rectangle costs; `torchrec_cost.py` is what TorchRec says it does), then `estimate.py`,
then `terms.py` (the same costs for solvers), `bounds.py` (how short no step is), `greedy.py` and `exact.py`;
`why.py` answers questions about plans.
"""

from recshard_lab.planner.access import AccessProfile as AccessProfile
from recshard_lab.planner.answers import Explained as Explained
from recshard_lab.planner.answers import PlanDiff as PlanDiff
from recshard_lab.planner.answers import WhyNot as WhyNot
from recshard_lab.planner.constraint_files import read_constraints as read_constraints
from recshard_lab.planner.cost import PHASES as PHASES
from recshard_lab.planner.cost import CostModel as CostModel
from recshard_lab.planner.estimate import Estimate as Estimate
from recshard_lab.planner.estimate import estimate as estimate
from recshard_lab.planner.memory import MEMORY_CATEGORIES as MEMORY_CATEGORIES
from recshard_lab.planner.mlperf_example import mlperf_dlrm_dcnv2_tables as mlperf_dlrm_dcnv2_tables
from recshard_lab.planner.mlperf_example import mlperf_dlrm_dcnv2_workload as mlperf_dlrm_dcnv2_workload
from recshard_lab.planner.mlperf_shown import mlperf_example as mlperf_example
from recshard_lab.planner.planner import EmbeddingShardingPlanner as EmbeddingShardingPlanner
from recshard_lab.planner.planner import tables_of as tables_of
from recshard_lab.planner.reservations import FixedPercentageStorageReservation as FixedPercentageStorageReservation
from recshard_lab.planner.reservations import HeuristicalStorageReservation as HeuristicalStorageReservation
from recshard_lab.planner.sources import Source as Source
from recshard_lab.planner.sources import read_source as read_source
from recshard_lab.planner.sweep_points import Sweep as Sweep
from recshard_lab.planner.sweep_points import SweepPoint as SweepPoint
from recshard_lab.planner.table_files import TableFile as TableFile
from recshard_lab.planner.table_files import read_tables as read_tables
from recshard_lab.planner.torchrec_cost import TorchRecCostModel as TorchRecCostModel
from recshard_lab.planner.whatif import sweep as sweep
from recshard_lab.planner.workload import Workload as Workload
