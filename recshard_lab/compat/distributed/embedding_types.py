"""``torchrec.distributed.embedding_types``: lists of batches, kinds of optimizers; the switch of distinct ids."""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from recshard_lab.distributed import CollectionSharder
from recshard_lab.sharding import ParameterSharding
from recshard_lab.sparse import KeyedTensor, Multistreamable

EC_INDEX_DEDUP = False


class OptimType(Enum):
    """Optimizers that a kernel may run in backward."""

    SGD = "SGD"
    LARS_SGD = "LARS_SGD"
    LAMB = "LAMB"
    PARTIAL_ROWWISE_LAMB = "PARTIAL_ROWWISE_LAMB"
    ADAM = "ADAM"
    PARTIAL_ROWWISE_ADAM = "PARTIAL_ROWWISE_ADAM"
    ADAGRAD = "ADAGRAD"
    ROWWISE_ADAGRAD = "ROWWISE_ADAGRAD"
    SHAMPOO = "SHAMPOO"
    SHAMPOO_V2 = "SHAMPOO_V2"
    LION = "LION"
    ADAMW = "ADAMW"
    SHAMPOO_V2_MRS = "SHAMPOO_V2_MRS"
    SHAMPOO_MRS = "SHAMPOO_MRS"
    MUON = "MUON"
    SHAMPOO_V3_MRS = "SHAMPOO_V3_MRS"


class _ListOfBatches(Multistreamable):
    """A list whose memory other streams may use."""

    def __init__(self, features: list[Any]) -> None:
        self.features = features

    def __len__(self) -> int:
        return len(self.features)

    def __getitem__(self, key: int) -> Any:
        return self.features[key]

    def __setitem__(self, key: int, item: Any) -> None:
        self.features[key] = item

    def __iter__(self) -> Iterator[Any]:
        return iter(self.features)

    def record_stream(self, stream: torch.Stream) -> None:
        """Keeps the memory of all batches until the stream has used it."""
        for own in self.features:
            own.record_stream(stream)


class KJTList(_ListOfBatches):
    """A list of KeyedJaggedTensors.

    >>> from recshard_lab.sparse import KeyedJaggedTensor
    >>> len(KJTList([KeyedJaggedTensor(["f"], torch.tensor([1]), lengths=torch.tensor([1]))]))
    1
    """


class ListOfKJTList(_ListOfBatches):
    """A list of `KJTList`."""


def construct_output_kt(embeddings: list[Tensor], embedding_names: list[str], embedding_dims: list[int]) -> KeyedTensor:
    """A KeyedTensor of outputs.

    Args:
        embeddings: ``[B, D]`` each.
        embedding_names: one key per output.
        embedding_dims: their D.
    """
    values = embeddings[0] if len(embeddings) == 1 else torch.cat(embeddings, dim=1)
    return KeyedTensor(embedding_names, embedding_dims, values)


def get_ec_index_dedup() -> bool:
    """Whether every sharder of sequence collections sends distinct ids only: see `set_ec_index_dedup`."""
    return CollectionSharder.always_dedups


def set_ec_index_dedup(val: bool) -> None:
    """Makes every sharder of sequence collections send distinct ids only, as ``use_index_dedup=True`` does for one."""
    CollectionSharder.always_dedups = bool(val)


def get_device_from_parameter_sharding(ps: ParameterSharding) -> str | tuple[str, ...]:
    """The device type of a table's shards; one for each shard if they differ.

    >>> from recshard_lab.sharding import Shard
    >>> get_device_from_parameter_sharding(ParameterSharding("table_wise", shards=[Shard(0, (0, 4), (0, 2))]))
    'cpu'
    """
    spec = ps.sharding_spec
    assert spec is not None, "a replicated table has no shards"
    kinds = tuple(str(shard.placement.device().type) for shard in spec.shards)
    return kinds[0] if len(set(kinds)) == 1 else kinds
