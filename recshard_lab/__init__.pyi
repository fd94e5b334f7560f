# The names of this package, with their types; `__init__.py` loads each when it is first used.

import IPython.core.interactiveshell

from . import calibration as calibration
from . import cli as cli
from . import comm as comm
from . import compat as compat
from . import data as data
from . import distributed as distributed
from . import embedding as embedding
from . import lab as lab
from . import launcher as launcher
from . import models as models
from . import optim as optim
from . import planner as planner
from . import saved as saved
from . import selftest as selftest
from . import serving as serving
from . import sharding as sharding
from . import sparse as sparse
from . import train as train
from .data import MovieLens as MovieLens
from .distributed import DistributedModelParallel as DistributedModelParallel
from .distributed import load_checkpoint as load_checkpoint
from .distributed import save_checkpoint as save_checkpoint
from .embedding import DataType as DataType
from .embedding import DynamicEmbeddingBagCollection as DynamicEmbeddingBagCollection
from .embedding import DynamicEmbeddingCollection as DynamicEmbeddingCollection
from .embedding import DynamicEmbeddingConfig as DynamicEmbeddingConfig
from .embedding import EmbeddingBagCollection as EmbeddingBagCollection
from .embedding import EmbeddingBagConfig as EmbeddingBagConfig
from .embedding import EmbeddingCollection as EmbeddingCollection
from .embedding import EmbeddingConfig as EmbeddingConfig
from .embedding import FusedEmbeddingBagCollection as FusedEmbeddingBagCollection
from .embedding import PoolingType as PoolingType
from .embedding import quantize_embeddings as quantize_embeddings
from .lab import PlanCompare as PlanCompare
from .lab import compare_plans as compare_plans
from .lab import export as export
from .launcher import LaunchError as LaunchError
from .launcher import RankError as RankError
from .launcher import Ranks as Ranks
from .launcher import launch as launch
from .models import DLRM as DLRM
from .planner import EmbeddingShardingPlanner as EmbeddingShardingPlanner
from .planner import Workload as Workload
from .planner import estimate as estimate
from .planner import plan as plan
from .planner import sweep as sweep
from .serving import shard_for_inference as shard_for_inference
from .sharding import ParameterConstraints as ParameterConstraints
from .sharding import ParameterSharding as ParameterSharding
from .sharding import PlanError as PlanError
from .sharding import Shard as Shard
from .sharding import ShardingPlan as ShardingPlan
from .sharding import Topology as Topology
from .sharding import column_wise as column_wise
from .sharding import data_parallel as data_parallel
from .sharding import flex_shard as flex_shard
from .sharding import grid_shard as grid_shard
from .sharding import row_wise as row_wise
from .sharding import table_column_wise as table_column_wise
from .sharding import table_row_wise as table_row_wise
from .sharding import table_wise as table_wise
from .sparse import JaggedTensor as JaggedTensor
from .sparse import KeyedJaggedTensor as KeyedJaggedTensor
from .sparse import KeyedTensor as KeyedTensor

__version__: str

def load_ipython_extension(shell: IPython.core.interactiveshell.InteractiveShell) -> None: ...
def unload_ipython_extension(shell: IPython.core.interactiveshell.InteractiveShell) -> None: ...
