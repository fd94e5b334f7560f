"""Sharded collections and models: one executor that runs any tiling."""

from recshard_lab.comm import ShardingEnv as ShardingEnv
from recshard_lab.distributed.awaitable import Awaitable as Awaitable
from recshard_lab.distributed.awaitable import LazyAwaitable as LazyAwaitable
from recshard_lab.distributed.awaitable import LazyNoWait as LazyNoWait
from recshard_lab.distributed.awaitable import NoWait as NoWait
from recshard_lab.distributed.data_parallel import DataParallelWrapper as DataParallelWrapper
from recshard_lab.distributed.data_parallel import DefaultDataParallelWrapper as DefaultDataParallelWrapper
from recshard_lab.distributed.data_parallel import FullyShardWrapper as FullyShardWrapper
from recshard_lab.distributed.delta_tracker import ModelDeltaTracker as ModelDeltaTracker
from recshard_lab.distributed.delta_tracker import TrackingMode as TrackingMode
from recshard_lab.distributed.dmp_collection import DMPCollection as DMPCollection
from recshard_lab.distributed.dmp_collection import ShardingStrategy as ShardingStrategy
from recshard_lab.distributed.managed_collision import (
    ManagedCollisionEmbeddingBagCollectionSharder as ManagedCollisionEmbeddingBagCollectionSharder,
)
from recshard_lab.distributed.managed_collision import (
    ManagedCollisionEmbeddingCollectionSharder as ManagedCollisionEmbeddingCollectionSharder,
)
from recshard_lab.distributed.managed_collision import (
    ShardedManagedCollisionEmbeddingBagCollection as ShardedManagedCollisionEmbeddingBagCollection,
)
from recshard_lab.distributed.managed_collision import (
    ShardedManagedCollisionEmbeddingCollection as ShardedManagedCollisionEmbeddingCollection,
)
from recshard_lab.distributed.model_parallel import DistributedModelParallel as DistributedModelParallel
from recshard_lab.distributed.peers import RankPeers as RankPeers
from recshard_lab.distributed.shard import shard as shard
from recshard_lab.distributed.shard import shard_modules as shard_modules
from recshard_lab.distributed.sharded_collections import ShardedCollection as ShardedCollection
from recshard_lab.distributed.sharded_collections import (
    ShardedEmbeddingBagCollection as ShardedEmbeddingBagCollection,
)
from recshard_lab.distributed.sharded_collections import (
    ShardedEmbeddingCollection as ShardedEmbeddingCollection,
)
from recshard_lab.distributed.sharders import CollectionSharder as CollectionSharder
from recshard_lab.distributed.sharders import (
    DynamicEmbeddingBagCollectionSharder as DynamicEmbeddingBagCollectionSharder,
)
from recshard_lab.distributed.sharders import DynamicEmbeddingCollectionSharder as DynamicEmbeddingCollectionSharder
from recshard_lab.distributed.sharders import EmbeddingBagCollectionSharder as EmbeddingBagCollectionSharder
from recshard_lab.distributed.sharders import EmbeddingCollectionSharder as EmbeddingCollectionSharder
from recshard_lab.distributed.sharders import FusedEmbeddingBagCollectionSharder as FusedEmbeddingBagCollectionSharder
from recshard_lab.distributed.sharders import FusedEmbeddingCollectionSharder as FusedEmbeddingCollectionSharder
from recshard_lab.distributed.sharders import ModuleSharder as ModuleSharder
from recshard_lab.distributed.sharders import get_default_sharders as get_default_sharders
from recshard_lab.distributed.sharders import get_module_to_default_sharders as get_module_to_default_sharders
from recshard_lab.distributed.state.live_reshard import Resharded as Resharded
from recshard_lab.distributed.step.executor import Executor as Executor
