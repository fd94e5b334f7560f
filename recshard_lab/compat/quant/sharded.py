"""``torchrec.distributed.quant_embeddingbag`` and ``quant_embedding``: quantized tables over devices of one process."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from functools import partial
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn

from recshard_lab.compat.quant.modules import (
    EmbeddingBagCollection,
    EmbeddingCollection,
    FeatureProcessedEmbeddingBagCollection,
    QuantManagedCollisionEmbeddingBagCollection,
    QuantManagedCollisionEmbeddingCollection,
)
from recshard_lab.embedding import ManagedCollisionCollection
from recshard_lab.serving.inference.devices import Device, devices_named
from recshard_lab.serving.inference.packed import packed_table
from recshard_lab.serving.inference.tiles import DeviceEmbeddingBagCollection, DeviceEmbeddingCollection, DeviceTiles
from recshard_lab.sharding import EmbeddingComputeKernel, ParameterSharding, ShardingType, configs_of
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


class _Sharded(DeviceTiles):
    """What both kinds of sharded collections add: TorchRec's constructor.

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
            configs_of(module) or [],
            table_name_to_parameter_sharding,
            [Device(place, number) for number, place in enumerate(places)],
            output,
            partial(packed_table, module),
            weighted=bool(getattr(module, "is_weighted", lambda: False)()),
            out_of_range=module.out_of_range,
            need_indices=bool(getattr(module, "need_indices", lambda: False)()),
        )


class ShardedQuantEmbeddingBagCollection(_Sharded, DeviceEmbeddingBagCollection):
    """A quantized `EmbeddingBagCollection` over several devices of this process. Arguments as of `_Sharded`."""


class ShardedQuantEmbeddingCollection(_Sharded, DeviceEmbeddingCollection):
    """A quantized `EmbeddingCollection` over several devices of this process. Arguments as of `_Sharded`."""


class ShardedQuantFeatureProcessedEmbeddingBagCollection(ShardedQuantEmbeddingBagCollection):
    """A quantized collection after a feature processor, over several devices. The processor runs before the exchange.

    Args:
        module, table_name_to_parameter_sharding, env, fused_params, device: as of `ShardedQuantEmbeddingBagCollection`.
        feature_processor: is copied to the output device. Default: that of the module.
    """

    def __init__(
        self,
        module: Any,
        table_name_to_parameter_sharding: Mapping[str, ParameterSharding],
        env: Environment,
        fused_params: dict[str, Any] | None = None,
        device: torch.device | None = None,
        feature_processor: nn.Module | None = None,
    ) -> None:
        super().__init__(module, table_name_to_parameter_sharding, env, fused_params, device)
        processor = module.feature_processor if feature_processor is None else feature_processor
        self.feature_processor = deepcopy(processor).to(self.output)

    def forward(self, features: KeyedJaggedTensor) -> Any:
        """Looks up one batch with the weights that the processor computes."""
        return super().forward(self.feature_processor(features))


class _Managed(_Sharded):
    """What sharded managed collections add: ids become rows on the output device, before they are sent.

    Args:
        module, table_name_to_parameter_sharding, env, fused_params, device: as of `_Sharded`.
        mc_sharder: shards the modules that find the rows.
    """

    def __init__(
        self,
        module: Any,
        table_name_to_parameter_sharding: Mapping[str, ParameterSharding],
        mc_sharder: InferManagedCollisionCollectionSharder,
        env: Environment,
        fused_params: dict[str, Any] | None = None,
        device: torch.device | None = None,
    ) -> None:
        super().__init__(module, table_name_to_parameter_sharding, env, fused_params, device)
        collection = module._managed_collision_collection
        shards = table_name_to_parameter_sharding
        self._managed_collision_collection = mc_sharder.shard(collection, shards, env, [], self.output)

    def forward(self, features: KeyedJaggedTensor) -> tuple[Any, None]:
        """Looks up one batch. Returns what the collection returns, and None, as TorchRec's sharded form does."""
        return super().forward(self._managed_collision_collection(features)), None


class ShardedQuantManagedCollisionEmbeddingBagCollection(_Managed, ShardedQuantEmbeddingBagCollection):
    """A quantized managed collection over several devices. Arguments as of `_Managed`."""


class ShardedQuantManagedCollisionEmbeddingCollection(_Managed, ShardedQuantEmbeddingCollection):
    """A quantized managed collection of sequences over several devices. Arguments as of `_Managed`."""


class QuantEmbeddingBagCollectionSharder:
    """Shards quantized collections by a plan.

    Args:
        fused_params: accepted as in TorchRec; they choose how fbgemm's kernels are built.
        shardable_params: the tables that `shardable_parameters` returns. Default: all.
    """

    _type: ClassVar[type[nn.Module]] = EmbeddingBagCollection
    _sharded: ClassVar[Any] = ShardedQuantEmbeddingBagCollection

    def __init__(self, fused_params: dict[str, Any] | None = None, shardable_params: list[str] | None = None) -> None:
        self._fused_params, self._shardable_params = fused_params, shardable_params

    @property
    def fused_params(self) -> dict[str, Any] | None:
        """As passed."""
        return self._fused_params

    @property
    def module_type(self) -> type[nn.Module]:
        """The collections that it shards."""
        return self._type

    def sharding_types(self, compute_device_type: str) -> list[str]:
        """The named schemes of tables; every other tiling works too."""
        return [str(kind) for kind in (ShardingType.TABLE_WISE, ShardingType.ROW_WISE, ShardingType.COLUMN_WISE)]

    def compute_kernels(self, sharding_type: str, compute_device_type: str) -> list[str]:
        """The kernel that plans of this library name. TorchRec's is "quant"."""
        return [str(EmbeddingComputeKernel.FUSED)]

    def shardable_parameters(self, module: nn.Module) -> dict[str, Tensor]:
        """Table -> its bytes ``[E, R]`` uint8."""
        tables: Any = module
        names = [table.name for table in configs_of(tables) or []]
        wanted = names if self._shardable_params is None else self._shardable_params
        return {name: tables.packed(name) for name in names if name in wanted}

    def shard(
        self,
        module: nn.Module,
        params: Mapping[str, ParameterSharding],
        env: Environment,
        device: torch.device | None = None,
        module_fqn: str | None = None,
    ) -> Any:
        """The collection over several devices; arguments as of `ShardedQuantEmbeddingBagCollection`.

        Args:
            module_fqn: accepted as in TorchRec.
        """
        return self._sharded(module, params, env, self._fused_params, device)


class QuantEmbeddingCollectionSharder(QuantEmbeddingBagCollectionSharder):
    """Shards quantized collections of sequences. Arguments as of `QuantEmbeddingBagCollectionSharder`."""

    _type = EmbeddingCollection
    _sharded = ShardedQuantEmbeddingCollection


class QuantFeatureProcessedEmbeddingBagCollectionSharder(QuantEmbeddingBagCollectionSharder):
    """Shards quantized collections after feature processors, as `QuantEmbeddingBagCollectionSharder` does others."""

    _type = FeatureProcessedEmbeddingBagCollection
    _sharded = ShardedQuantFeatureProcessedEmbeddingBagCollection

    def sharding_types(self, compute_device_type: str) -> list[str]:
        """The named schemes of TorchRec's sharder; every other tiling works too."""
        return [str(kind) for kind in (ShardingType.TABLE_WISE, ShardingType.COLUMN_WISE)]


class InferManagedCollisionCollectionSharder:
    """Places the modules that find the rows of ids. All of them run on the output device, before ids are sent.

    Args:
        qcomm_codecs_registry: accepted as in TorchRec: devices of one process exchange no messages.
    """

    module_type = ManagedCollisionCollection

    def __init__(self, qcomm_codecs_registry: Any = None) -> None:
        self.qcomm_codecs_registry = qcomm_codecs_registry

    def sharding_types(self, compute_device_type: str) -> list[str]:
        """The named scheme of TorchRec's sharder."""
        return [str(ShardingType.ROW_WISE)]

    def shard(
        self,
        module: nn.Module,
        params: Mapping[str, ParameterSharding],
        env: Environment,
        embedding_shardings: list[Any],
        device: torch.device | None = None,
    ) -> nn.Module:
        """A copy of the modules in evaluation mode, on the device.

        Args:
            module: a `ManagedCollisionCollection`.
            params, env, embedding_shardings: accepted as in TorchRec: the modules are not split.
            device: default: where they are.
        """
        twin = deepcopy(module).eval()
        return twin if device is None else twin.to(device)


class QuantManagedCollisionEmbeddingBagCollectionSharder(QuantEmbeddingBagCollectionSharder):
    """Shards quantized managed collections.

    Args:
        e_sharder: sharder of the collection inside, whose settings are used.
        mc_sharder: sharder of the modules that find the rows of ids.
    """

    _type: ClassVar[type[nn.Module]] = QuantManagedCollisionEmbeddingBagCollection
    _sharded: ClassVar[Any] = ShardedQuantManagedCollisionEmbeddingBagCollection

    def __init__(
        self, e_sharder: QuantEmbeddingBagCollectionSharder, mc_sharder: InferManagedCollisionCollectionSharder
    ) -> None:
        super().__init__(e_sharder._fused_params, e_sharder._shardable_params)
        self._e_sharder, self._mc_sharder = e_sharder, mc_sharder

    def sharding_types(self, compute_device_type: str) -> list[str]:
        """The schemes of both sharders."""
        both = self._mc_sharder.sharding_types(compute_device_type)
        return [kind for kind in self._e_sharder.sharding_types(compute_device_type) if kind in both]

    def shard(
        self,
        module: nn.Module,
        params: Mapping[str, ParameterSharding],
        env: Environment,
        device: torch.device | None = None,
        module_fqn: str | None = None,
    ) -> Any:
        """The collection over several devices; arguments as of `QuantEmbeddingBagCollectionSharder.shard`."""
        return self._sharded(module, params, self._mc_sharder, env, self._fused_params, device)


class QuantManagedCollisionEmbeddingCollectionSharder(QuantManagedCollisionEmbeddingBagCollectionSharder):
    """Shards quantized managed collections of sequences. See `QuantManagedCollisionEmbeddingBagCollectionSharder`."""

    _type = QuantManagedCollisionEmbeddingCollection
    _sharded = ShardedQuantManagedCollisionEmbeddingCollection
