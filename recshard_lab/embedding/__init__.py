"""Embedding tables: what they are, the unsharded truth, the kernels that look rows up and step them.

Read first: `configs`, then `collections`, then `kernels`.
"""

from recshard_lab.embedding.collections import EmbeddingBagCollection as EmbeddingBagCollection
from recshard_lab.embedding.collections import EmbeddingBagCollectionInterface as EmbeddingBagCollectionInterface
from recshard_lab.embedding.collections import EmbeddingCollection as EmbeddingCollection
from recshard_lab.embedding.collections import EmbeddingCollectionInterface as EmbeddingCollectionInterface
from recshard_lab.embedding.configs import BaseEmbeddingConfig as BaseEmbeddingConfig
from recshard_lab.embedding.configs import DataType as DataType
from recshard_lab.embedding.configs import EmbeddingBagConfig as EmbeddingBagConfig
from recshard_lab.embedding.configs import EmbeddingConfig as EmbeddingConfig
from recshard_lab.embedding.configs import PoolingType as PoolingType
from recshard_lab.embedding.configs import embedding_names_by_table as embedding_names_by_table
from recshard_lab.embedding.data_types import DATA_TYPE_NUM_BITS as DATA_TYPE_NUM_BITS
from recshard_lab.embedding.data_types import data_type_to_dtype as data_type_to_dtype
from recshard_lab.embedding.data_types import dtype_to_data_type as dtype_to_data_type
from recshard_lab.embedding.data_types import pooling_type_to_str as pooling_type_to_str
from recshard_lab.embedding.dynamic import DynamicEmbeddingBagCollection as DynamicEmbeddingBagCollection
from recshard_lab.embedding.dynamic import DynamicEmbeddingCollection as DynamicEmbeddingCollection
from recshard_lab.embedding.dynamic import DynamicEmbeddingConfig as DynamicEmbeddingConfig
from recshard_lab.embedding.dynamic import DynamicTable as DynamicTable
from recshard_lab.embedding.dynamic import EmulatedCost as EmulatedCost
from recshard_lab.embedding.dynamic import Tier as Tier
from recshard_lab.embedding.dynamic import VocabularyEmbeddingBagCollection as VocabularyEmbeddingBagCollection
from recshard_lab.embedding.dynamic import VocabularyEmbeddingCollection as VocabularyEmbeddingCollection
from recshard_lab.embedding.dynamic import export_static as export_static
from recshard_lab.embedding.fused import FusedCollection as FusedCollection
from recshard_lab.embedding.fused import FusedEmbeddingBagCollection as FusedEmbeddingBagCollection
from recshard_lab.embedding.fused import FusedEmbeddingCollection as FusedEmbeddingCollection
from recshard_lab.embedding.fused import apply_optimizer_in_backward as apply_optimizer_in_backward
from recshard_lab.embedding.fused import fuse_embedding_optimizer as fuse_embedding_optimizer
from recshard_lab.embedding.managed_collision import (
    BaseManagedCollisionEmbeddingCollection as BaseManagedCollisionEmbeddingCollection,
)
from recshard_lab.embedding.managed_collision import DistanceLFU_EvictionPolicy as DistanceLFU_EvictionPolicy
from recshard_lab.embedding.managed_collision import HashZchEvictionConfig as HashZchEvictionConfig
from recshard_lab.embedding.managed_collision import HashZchEvictionPolicyName as HashZchEvictionPolicyName
from recshard_lab.embedding.managed_collision import HashZchManagedCollisionModule as HashZchManagedCollisionModule
from recshard_lab.embedding.managed_collision import LFU_EvictionPolicy as LFU_EvictionPolicy
from recshard_lab.embedding.managed_collision import LRU_EvictionPolicy as LRU_EvictionPolicy
from recshard_lab.embedding.managed_collision import ManagedCollisionCollection as ManagedCollisionCollection
from recshard_lab.embedding.managed_collision import (
    ManagedCollisionEmbeddingBagCollection as ManagedCollisionEmbeddingBagCollection,
)
from recshard_lab.embedding.managed_collision import (
    ManagedCollisionEmbeddingCollection as ManagedCollisionEmbeddingCollection,
)
from recshard_lab.embedding.managed_collision import ManagedCollisionModule as ManagedCollisionModule
from recshard_lab.embedding.managed_collision import MCHEvictionPolicy as MCHEvictionPolicy
from recshard_lab.embedding.managed_collision import MCHEvictionPolicyMetadataInfo as MCHEvictionPolicyMetadataInfo
from recshard_lab.embedding.managed_collision import MCHManagedCollisionModule as MCHManagedCollisionModule
from recshard_lab.embedding.managed_collision import average_threshold_filter as average_threshold_filter
from recshard_lab.embedding.managed_collision import dynamic_threshold_filter as dynamic_threshold_filter
from recshard_lab.embedding.managed_collision import probabilistic_threshold_filter as probabilistic_threshold_filter
from recshard_lab.embedding.optimizers import EmbOptimType as EmbOptimType
from recshard_lab.embedding.optimizers import OptimizerSpec as OptimizerSpec
from recshard_lab.embedding.optimizers import RowWiseAdagrad as RowWiseAdagrad
from recshard_lab.embedding.optimizers import WeightDecayMode as WeightDecayMode
from recshard_lab.embedding.quantized.collections import QuantConfig as QuantConfig
from recshard_lab.embedding.quantized.collections import QuantEmbeddingBagCollection as QuantEmbeddingBagCollection
from recshard_lab.embedding.quantized.collections import QuantEmbeddingCollection as QuantEmbeddingCollection
from recshard_lab.embedding.quantized.quantize import QuantizationReport as QuantizationReport
from recshard_lab.embedding.quantized.quantize import quantization_report as quantization_report
from recshard_lab.embedding.quantized.quantize import quantize_embeddings as quantize_embeddings
from recshard_lab.embedding.regroup import KTRegroupAsDict as KTRegroupAsDict

__all__ = [
    "DATA_TYPE_NUM_BITS",
    "BaseEmbeddingConfig",
    "BaseManagedCollisionEmbeddingCollection",
    "DataType",
    "DistanceLFU_EvictionPolicy",
    "DynamicEmbeddingBagCollection",
    "DynamicEmbeddingCollection",
    "DynamicEmbeddingConfig",
    "DynamicTable",
    "EmbOptimType",
    "EmbeddingBagCollection",
    "EmbeddingBagCollectionInterface",
    "EmbeddingBagConfig",
    "EmbeddingCollection",
    "EmbeddingCollectionInterface",
    "EmbeddingConfig",
    "EmulatedCost",
    "FusedCollection",
    "FusedEmbeddingBagCollection",
    "FusedEmbeddingCollection",
    "HashZchEvictionConfig",
    "HashZchEvictionPolicyName",
    "HashZchManagedCollisionModule",
    "KTRegroupAsDict",
    "LFU_EvictionPolicy",
    "LRU_EvictionPolicy",
    "MCHEvictionPolicy",
    "MCHEvictionPolicyMetadataInfo",
    "MCHManagedCollisionModule",
    "ManagedCollisionCollection",
    "ManagedCollisionEmbeddingBagCollection",
    "ManagedCollisionEmbeddingCollection",
    "ManagedCollisionModule",
    "OptimizerSpec",
    "PoolingType",
    "QuantConfig",
    "QuantEmbeddingBagCollection",
    "QuantEmbeddingCollection",
    "QuantizationReport",
    "RowWiseAdagrad",
    "Tier",
    "VocabularyEmbeddingBagCollection",
    "VocabularyEmbeddingCollection",
    "WeightDecayMode",
    "apply_optimizer_in_backward",
    "average_threshold_filter",
    "data_type_to_dtype",
    "dtype_to_data_type",
    "dynamic_threshold_filter",
    "embedding_names_by_table",
    "export_static",
    "fuse_embedding_optimizer",
    "pooling_type_to_str",
    "probabilistic_threshold_filter",
    "quantization_report",
    "quantize_embeddings",
]
