"""Embedding tables: what they are, the unsharded truth, the kernels that look rows up and step them.

Read first: `configs`, then `collections`, then `kernels`.
"""

from recshard_lab.embedding.collections import EmbeddingBagCollection as EmbeddingBagCollection
from recshard_lab.embedding.collections import EmbeddingCollection as EmbeddingCollection
from recshard_lab.embedding.configs import BaseEmbeddingConfig as BaseEmbeddingConfig
from recshard_lab.embedding.configs import DataType as DataType
from recshard_lab.embedding.configs import EmbeddingBagConfig as EmbeddingBagConfig
from recshard_lab.embedding.configs import EmbeddingConfig as EmbeddingConfig
from recshard_lab.embedding.configs import PoolingType as PoolingType
from recshard_lab.embedding.configs import embedding_names_by_table as embedding_names_by_table
from recshard_lab.embedding.fused_collections import FusedEmbeddingBagCollection as FusedEmbeddingBagCollection
from recshard_lab.embedding.in_backward import apply_optimizer_in_backward as apply_optimizer_in_backward
from recshard_lab.embedding.optimizers import EmbOptimType as EmbOptimType
from recshard_lab.embedding.optimizers import OptimizerSpec as OptimizerSpec
from recshard_lab.embedding.optimizers import RowWiseAdagrad as RowWiseAdagrad
from recshard_lab.embedding.optimizers import WeightDecayMode as WeightDecayMode
from recshard_lab.embedding.regroup import KTRegroupAsDict as KTRegroupAsDict

__all__ = [
    "BaseEmbeddingConfig",
    "DataType",
    "EmbOptimType",
    "EmbeddingBagCollection",
    "EmbeddingBagConfig",
    "EmbeddingCollection",
    "EmbeddingConfig",
    "FusedEmbeddingBagCollection",
    "KTRegroupAsDict",
    "OptimizerSpec",
    "PoolingType",
    "RowWiseAdagrad",
    "WeightDecayMode",
    "apply_optimizer_in_backward",
    "embedding_names_by_table",
]
