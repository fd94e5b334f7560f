"""Jagged batches: which ids each sample has of each feature, and what is looked up for them."""

from recshard_lab.sparse.checks import UnknownKeyError as UnknownKeyError
from recshard_lab.sparse.interop import ComputeJTDictToKJT as ComputeJTDictToKJT
from recshard_lab.sparse.interop import ComputeKJTToJTDict as ComputeKJTToJTDict
from recshard_lab.sparse.interop import Multistreamable as Multistreamable
from recshard_lab.sparse.interop import Pipelineable as Pipelineable
from recshard_lab.sparse.interop import jt_is_equal as jt_is_equal
from recshard_lab.sparse.interop import kjt_is_equal as kjt_is_equal
from recshard_lab.sparse.jagged_tensor import JaggedTensor as JaggedTensor
from recshard_lab.sparse.jagged_tensor import record_stream as record_stream
from recshard_lab.sparse.keyed_jagged_tensor import KeyedJaggedTensor as KeyedJaggedTensor
from recshard_lab.sparse.keyed_tensor import KeyedTensor as KeyedTensor
from recshard_lab.sparse.keyed_tensor import regroup_kts as regroup_kts
from recshard_lab.sparse.ops import complete_cumsum as complete_cumsum
from recshard_lab.sparse.ops import gather_segments as gather_segments
from recshard_lab.sparse.validator import validate_keyed_jagged_tensor as validate_keyed_jagged_tensor

__all__ = [
    "ComputeJTDictToKJT",
    "ComputeKJTToJTDict",
    "JaggedTensor",
    "KeyedJaggedTensor",
    "KeyedTensor",
    "Multistreamable",
    "Pipelineable",
    "UnknownKeyError",
    "complete_cumsum",
    "gather_segments",
    "jt_is_equal",
    "kjt_is_equal",
    "record_stream",
    "regroup_kts",
    "validate_keyed_jagged_tensor",
]
