"""``torchrec.distributed.quant_embeddingbag``: quantized tables over several devices of one process."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from recshard_lab.compat.quant.modules import EmbeddingBagCollection
from recshard_lab.serving.inference.devices import Device, devices_named
from recshard_lab.serving.inference.packed import packed_table
from recshard_lab.serving.inference.tiles import DeviceEmbeddingBagCollection
from recshard_lab.sharding import EmbeddingComputeKernel, ParameterSharding, ShardingType
from recshard_lab.sparse import KeyedJaggedTensor

FUSED_PARAM_REGISTER_TBE_BOOL = "__register_tbes_in_named_modules"
FUSED_PARAM_QUANT_STATE_DICT_SPLIT_SCALE_BIAS = "__register_quant_state_dict_split_scale_bias"
FUSED_PARAM_IS_SSD_TABLE = "__register_is_ssd_table"


class Sized(Protocol):
    """An environment: a `ShardingEnv`, or any object with the number of devices."""

    @property
    def world_size(self) -> int:
        """The number of devices."""


Environment = Sized | Mapping[str, Sized]


def flatten_feature_lengths(features: KeyedJaggedTensor) -> KeyedJaggedTensor:
    """The batch with lengths of one dimension; the same object if they have one already."""
    if features.lengths().dim() == 1:
        return features
    return KeyedJaggedTensor(
        keys=features.keys(),
        values=features.values(),
        weights=features.weights_or_none(),
        lengths=features.lengths().reshape(-1),
    )


def get_device_from_parameter_sharding(ps: ParameterSharding) -> str | tuple[str, ...]:
    """The kind of device of a table's shards, or the kind of each shard if they differ."""
    devices: Mapping[int, str] = ps.devices or {}
    kinds = tuple(torch.device(devices.get(shard.rank, "cpu")).type for shard in ps.shards)
    return kinds[0] if len(set(kinds)) == 1 else kinds


class ShardedQuantEmbeddingBagCollection(DeviceEmbeddingBagCollection):
    """A quantized `EmbeddingBagCollection` over several devices of this process.

    Args:
        module: the quantized collection. Its bytes are copied.
        table_name_to_parameter_sharding: table -> its shards; rank k is the k-th device.
        env: has the number of devices; or kind of device -> such an environment, of which one is used.
        fused_params: accepted as in TorchRec; they choose how fbgemm's kernels are built.
        device: of the outputs; its kind is that of all devices. Default: the device of the collection.

    Raises:
        ValueError: environments of several kinds of devices.
    """

    def __init__(
        self,
        module: Any,
        table_name_to_parameter_sharding: Mapping[str, ParameterSharding],
        env: Environment,
        fused_params: dict[str, Any] | None = None,
        device: torch.device | None = None,
    ) -> None:
        output = torch.device(module.device if device is None else device)
        if isinstance(env, Mapping):
            if len(env) != 1:
                raise ValueError(f"the tables have environments of {sorted(env)}. Fix: pass one environment")
            ((kind, env),) = env.items()
            output = torch.device(kind) if output.type != kind else output
        names = [f"cuda:{rank}" if output.type == "cuda" else "cpu" for rank in range(env.world_size)]
        places = devices_named(names)
        super().__init__(
            module.embedding_bag_configs(),
            table_name_to_parameter_sharding,
            [Device(place, number) for number, place in enumerate(places)],
            output,
            partial(packed_table, module),
            weighted=module.is_weighted(),
            out_of_range=module.out_of_range,
            need_indices=False,
        )


class QuantEmbeddingBagCollectionSharder:
    """Shards quantized collections by a plan.

    Args:
        fused_params: accepted as in TorchRec; they choose how fbgemm's kernels are built.
        shardable_params: the tables that `shardable_parameters` returns. Default: all.
    """

    def __init__(self, fused_params: dict[str, Any] | None = None, shardable_params: list[str] | None = None) -> None:
        self._fused_params, self._shardable_params = fused_params, shardable_params

    @property
    def fused_params(self) -> dict[str, Any] | None:
        """As passed."""
        return self._fused_params

    @property
    def module_type(self) -> type[EmbeddingBagCollection]:
        """The collections that it shards."""
        return EmbeddingBagCollection

    def sharding_types(self, compute_device_type: str) -> list[str]:
        """The named schemes of tables; every other tiling works too."""
        return [str(kind) for kind in (ShardingType.TABLE_WISE, ShardingType.ROW_WISE, ShardingType.COLUMN_WISE)]

    def compute_kernels(self, sharding_type: str, compute_device_type: str) -> list[str]:
        """The kernel that plans of this library name. TorchRec's is "quant"."""
        return [str(EmbeddingComputeKernel.FUSED)]

    def shardable_parameters(self, module: nn.Module) -> dict[str, Tensor]:
        """Table -> its bytes ``[E, R]`` uint8."""
        tables: Any = module
        names = [table.name for table in tables.embedding_bag_configs()]
        wanted = names if self._shardable_params is None else self._shardable_params
        return {name: tables.packed(name) for name in names if name in wanted}

    def shard(
        self,
        module: nn.Module,
        params: Mapping[str, ParameterSharding],
        env: Environment,
        device: torch.device | None = None,
        module_fqn: str | None = None,
    ) -> ShardedQuantEmbeddingBagCollection:
        """The collection over several devices; arguments as of `ShardedQuantEmbeddingBagCollection`.

        Args:
            module_fqn: accepted as in TorchRec.
        """
        return ShardedQuantEmbeddingBagCollection(module, params, env, self._fused_params, device)
