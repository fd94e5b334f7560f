"""Jagged batches: which ids each sample has of each feature, and what is looked up for them."""

from recshard_lab.sparse.checks import UnknownKeyError as UnknownKeyError
from recshard_lab.sparse.jagged_tensor import JaggedTensor as JaggedTensor
from recshard_lab.sparse.keyed_jagged_tensor import KeyedJaggedTensor as KeyedJaggedTensor
from recshard_lab.sparse.keyed_tensor import KeyedTensor as KeyedTensor
from recshard_lab.sparse.ops import complete_cumsum as complete_cumsum
from recshard_lab.sparse.ops import gather_segments as gather_segments

__all__ = [
    "JaggedTensor",
    "KeyedJaggedTensor",
    "KeyedTensor",
    "UnknownKeyError",
    "complete_cumsum",
    "gather_segments",
]
