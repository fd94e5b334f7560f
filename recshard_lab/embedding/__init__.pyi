# The names of this package, with their types; `__init__.py` loads each when it is first used.

from .collections import EmbeddingBagCollection as EmbeddingBagCollection
from .collections import EmbeddingBagCollectionInterface as EmbeddingBagCollectionInterface
from .collections import EmbeddingCollection as EmbeddingCollection
from .collections import EmbeddingCollectionInterface as EmbeddingCollectionInterface
from .configs import DATA_TYPE_NUM_BITS as DATA_TYPE_NUM_BITS
from .configs import BaseEmbeddingConfig as BaseEmbeddingConfig
from .configs import DataType as DataType
from .configs import EmbeddingBagConfig as EmbeddingBagConfig
from .configs import EmbeddingConfig as EmbeddingConfig
from .configs import PoolingType as PoolingType
from .configs import data_type_to_dtype as data_type_to_dtype
from .configs import dtype_to_data_type as dtype_to_data_type
from .configs import embedding_names_by_table as embedding_names_by_table
from .configs import pooling_type_to_str as pooling_type_to_str
from .dynamic import DynamicEmbeddingBagCollection as DynamicEmbeddingBagCollection
from .dynamic import DynamicEmbeddingCollection as DynamicEmbeddingCollection
from .dynamic import DynamicEmbeddingConfig as DynamicEmbeddingConfig
from .dynamic import DynamicTable as DynamicTable
from .dynamic import EmulatedCost as EmulatedCost
from .dynamic import Tier as Tier
from .dynamic import VocabularyEmbeddingBagCollection as VocabularyEmbeddingBagCollection
from .dynamic import VocabularyEmbeddingCollection as VocabularyEmbeddingCollection
from .dynamic import export_static as export_static
from .fused import FusedCollection as FusedCollection
from .fused import FusedEmbeddingBagCollection as FusedEmbeddingBagCollection
from .fused import FusedEmbeddingCollection as FusedEmbeddingCollection
from .fused import apply_optimizer_in_backward as apply_optimizer_in_backward
from .fused import fuse_embedding_optimizer as fuse_embedding_optimizer
from .managed_collision import (
    BaseManagedCollisionEmbeddingCollection as BaseManagedCollisionEmbeddingCollection,
)
from .managed_collision import DistanceLFU_EvictionPolicy as DistanceLFU_EvictionPolicy
from .managed_collision import HashZchEvictionConfig as HashZchEvictionConfig
from .managed_collision import HashZchEvictionPolicyName as HashZchEvictionPolicyName
from .managed_collision import HashZchManagedCollisionModule as HashZchManagedCollisionModule
from .managed_collision import LFU_EvictionPolicy as LFU_EvictionPolicy
from .managed_collision import LRU_EvictionPolicy as LRU_EvictionPolicy
from .managed_collision import ManagedCollisionCollection as ManagedCollisionCollection
from .managed_collision import (
    ManagedCollisionEmbeddingBagCollection as ManagedCollisionEmbeddingBagCollection,
)
from .managed_collision import (
    ManagedCollisionEmbeddingCollection as ManagedCollisionEmbeddingCollection,
)
from .managed_collision import ManagedCollisionModule as ManagedCollisionModule
from .managed_collision import MCHEvictionPolicy as MCHEvictionPolicy
from .managed_collision import MCHEvictionPolicyMetadataInfo as MCHEvictionPolicyMetadataInfo
from .managed_collision import MCHManagedCollisionModule as MCHManagedCollisionModule
from .managed_collision import average_threshold_filter as average_threshold_filter
from .managed_collision import dynamic_threshold_filter as dynamic_threshold_filter
from .managed_collision import probabilistic_threshold_filter as probabilistic_threshold_filter
from .optimizers import EmbOptimType as EmbOptimType
from .optimizers import OptimizerSpec as OptimizerSpec
from .optimizers import RowWiseAdagrad as RowWiseAdagrad
from .optimizers import WeightDecayMode as WeightDecayMode
from .quantized.collections import QuantConfig as QuantConfig
from .quantized.collections import QuantEmbeddingBagCollection as QuantEmbeddingBagCollection
from .quantized.collections import QuantEmbeddingCollection as QuantEmbeddingCollection
from .quantized.quantize import QuantizationReport as QuantizationReport
from .quantized.quantize import quantization_report as quantization_report
from .quantized.quantize import quantize_embeddings as quantize_embeddings
from .regroup import KTRegroupAsDict as KTRegroupAsDict
