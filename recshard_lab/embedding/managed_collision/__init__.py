"""Tables of fixed size for ids of any value: a module in front of the lookup gives rows to ids. TorchRec's names.

In walking order: `policies` ranks ids, `modules` keeps which id owns each row, `zero_collision` gives rows as long as
there are any, `collections` does this before a lookup and makes a row new when its owner changes. `kernel` does both
on the ranks of a sharded collection.
"""

from recshard_lab.embedding.managed_collision.collections import (
    BaseManagedCollisionEmbeddingCollection as BaseManagedCollisionEmbeddingCollection,
)
from recshard_lab.embedding.managed_collision.collections import (
    ManagedCollisionEmbeddingBagCollection as ManagedCollisionEmbeddingBagCollection,
)
from recshard_lab.embedding.managed_collision.collections import (
    ManagedCollisionEmbeddingCollection as ManagedCollisionEmbeddingCollection,
)
from recshard_lab.embedding.managed_collision.modules import ManagedCollisionCollection as ManagedCollisionCollection
from recshard_lab.embedding.managed_collision.modules import ManagedCollisionModule as ManagedCollisionModule
from recshard_lab.embedding.managed_collision.modules import MCHManagedCollisionModule as MCHManagedCollisionModule
from recshard_lab.embedding.managed_collision.policies import (
    DistanceLFU_EvictionPolicy as DistanceLFU_EvictionPolicy,
)
from recshard_lab.embedding.managed_collision.policies import LFU_EvictionPolicy as LFU_EvictionPolicy
from recshard_lab.embedding.managed_collision.policies import LRU_EvictionPolicy as LRU_EvictionPolicy
from recshard_lab.embedding.managed_collision.policies import MCHEvictionPolicy as MCHEvictionPolicy
from recshard_lab.embedding.managed_collision.policies import (
    MCHEvictionPolicyMetadataInfo as MCHEvictionPolicyMetadataInfo,
)
from recshard_lab.embedding.managed_collision.policies import average_threshold_filter as average_threshold_filter
from recshard_lab.embedding.managed_collision.policies import dynamic_threshold_filter as dynamic_threshold_filter
from recshard_lab.embedding.managed_collision.policies import (
    probabilistic_threshold_filter as probabilistic_threshold_filter,
)
from recshard_lab.embedding.managed_collision.zero_collision import HashZchEvictionConfig as HashZchEvictionConfig
from recshard_lab.embedding.managed_collision.zero_collision import (
    HashZchEvictionPolicyName as HashZchEvictionPolicyName,
)
from recshard_lab.embedding.managed_collision.zero_collision import (
    HashZchManagedCollisionModule as HashZchManagedCollisionModule,
)
