# The names of this package, with their types; `__init__.py` loads each when it is first used.

from .awaitable import Awaitable as Awaitable
from .awaitable import LazyAwaitable as LazyAwaitable
from .awaitable import LazyNoWait as LazyNoWait
from .awaitable import NoWait as NoWait
from .data_parallel import DataParallelWrapper as DataParallelWrapper
from .data_parallel import DefaultDataParallelWrapper as DefaultDataParallelWrapper
from .data_parallel import FullyShardWrapper as FullyShardWrapper
from .dmp_collection import DMPCollection as DMPCollection
from .dmp_collection import ShardingStrategy as ShardingStrategy
from .model_parallel import DistributedModelParallel as DistributedModelParallel
from .model_parallel import ShardingEnv as ShardingEnv
from .model_parallel import shard_modules as shard_modules
from .peers import RankPeers as RankPeers
from .row_tracker import DeltaTrackerConfig as DeltaTrackerConfig
from .row_tracker import ModelDeltaTracker as ModelDeltaTracker
from .row_tracker import TrackingMode as TrackingMode
from .sharded_collections import ShardedCollection as ShardedCollection
from .sharded_collections import ShardedEmbeddingBagCollection as ShardedEmbeddingBagCollection
from .sharded_collections import ShardedEmbeddingCollection as ShardedEmbeddingCollection
from .sharded_collections import (
    ShardedManagedCollisionEmbeddingBagCollection as ShardedManagedCollisionEmbeddingBagCollection,
)
from .sharded_collections import (
    ShardedManagedCollisionEmbeddingCollection as ShardedManagedCollisionEmbeddingCollection,
)
from .sharders import CollectionSharder as CollectionSharder
from .sharders import DynamicEmbeddingBagCollectionSharder as DynamicEmbeddingBagCollectionSharder
from .sharders import DynamicEmbeddingCollectionSharder as DynamicEmbeddingCollectionSharder
from .sharders import EmbeddingBagCollectionSharder as EmbeddingBagCollectionSharder
from .sharders import EmbeddingCollectionSharder as EmbeddingCollectionSharder
from .sharders import FusedEmbeddingBagCollectionSharder as FusedEmbeddingBagCollectionSharder
from .sharders import FusedEmbeddingCollectionSharder as FusedEmbeddingCollectionSharder
from .sharders import (
    ManagedCollisionEmbeddingBagCollectionSharder as ManagedCollisionEmbeddingBagCollectionSharder,
)
from .sharders import ManagedCollisionEmbeddingCollectionSharder as ManagedCollisionEmbeddingCollectionSharder
from .sharders import ModuleSharder as ModuleSharder
from .sharders import get_default_sharders as get_default_sharders
from .sharders import get_module_to_default_sharders as get_module_to_default_sharders
from .sharders import shard as shard
from .state.checkpoint import CheckpointError as CheckpointError
from .state.checkpoint import CheckpointSaveError as CheckpointSaveError
from .state.checkpoint import async_save_checkpoint as async_save_checkpoint
from .state.checkpoint import load_checkpoint as load_checkpoint
from .state.checkpoint import save_checkpoint as save_checkpoint
from .state.pretrained import load_pretrained as load_pretrained
from .state.reshard import Resharded as Resharded
from .step.executor import Executor as Executor
