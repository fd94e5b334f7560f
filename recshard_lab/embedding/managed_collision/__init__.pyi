# The names of this package, with their types; `__init__.py` loads each when it is first used.

from .collections import (
    BaseManagedCollisionEmbeddingCollection as BaseManagedCollisionEmbeddingCollection,
)
from .collections import (
    ManagedCollisionEmbeddingBagCollection as ManagedCollisionEmbeddingBagCollection,
)
from .collections import (
    ManagedCollisionEmbeddingCollection as ManagedCollisionEmbeddingCollection,
)
from .modules import ManagedCollisionCollection as ManagedCollisionCollection
from .modules import ManagedCollisionModule as ManagedCollisionModule
from .modules import MCHManagedCollisionModule as MCHManagedCollisionModule
from .policies import (
    DistanceLFU_EvictionPolicy as DistanceLFU_EvictionPolicy,
)
from .policies import LFU_EvictionPolicy as LFU_EvictionPolicy
from .policies import LRU_EvictionPolicy as LRU_EvictionPolicy
from .policies import MCHEvictionPolicy as MCHEvictionPolicy
from .policies import (
    MCHEvictionPolicyMetadataInfo as MCHEvictionPolicyMetadataInfo,
)
from .policies import average_threshold_filter as average_threshold_filter
from .policies import dynamic_threshold_filter as dynamic_threshold_filter
from .policies import (
    probabilistic_threshold_filter as probabilistic_threshold_filter,
)
from .zero_collision import HashZchEvictionConfig as HashZchEvictionConfig
from .zero_collision import (
    HashZchEvictionPolicyName as HashZchEvictionPolicyName,
)
from .zero_collision import (
    HashZchManagedCollisionModule as HashZchManagedCollisionModule,
)
