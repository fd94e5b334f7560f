"""``torchrec.distributed.types``: enumerations, awaitables with lazy items, contexts, sizes of tensors."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import Enum
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from recshard_lab.comm import ShardingEnv
from recshard_lab.distributed import LazyAwaitable, ShardingStrategy
from recshard_lab.sharding import EmbeddingModuleShardingPlan, ShardingPlan
from recshard_lab.sparse import Multistreamable

K = TypeVar("K")
V = TypeVar("V")
QuantizationContext = TypeVar("QuantizationContext")


class GenericMeta(type):
    """A metaclass of generic classes."""


class ComputeDevice(Enum):
    """Types of devices."""

    CUDA = "cuda"
    CPU = "cpu"
    MTIA = "mtia"


class ComputeKernel(Enum):
    """The kernel of a module that names none."""

    DEFAULT = "default"


class EmbeddingEvent(Enum):
    """Stages of a sharded forward, for annotations of profiles."""

    KJT_SPLITS_DIST = "splits_dist"
    KJT_TENSORS_DIST = "tensors_dist"
    LOOKUP = "lookup"
    OUTPUT_DIST = "output_dist"
    OUTPUT_DIST_WAIT = "output_dist_wait"


class ParameterStorage(Enum):
    """Memory of a table."""

    HBM = "hbm"
    DDR = "ddr"


class PipelineType(Enum):
    """Pipelines of the planner's workload."""

    NONE = "none"
    TRAIN_BASE = "train_base"
    TRAIN_SPARSE_DIST = "train_sparse_dist"
    TRAIN_PREFETCH_SPARSE_DIST = "train_prefetch_sparse_dist"


class StorageUsageType(Enum):
    """Sharders whose `compute_storage_usage` differs."""

    BASE_QUANT = "BaseQuantEmbeddingSharder"
    BASE = "BaseEmbeddingSharder"
    DEFAULT = "ModuleSharder"


class ObjectPoolShardingType(Enum):
    """Schemes of a pool of objects."""

    ROW_WISE = "row_wise"
    REPLICATED_ROW_WISE = "replicated_row_wise"


# ---- plans ----


class ModuleShardingPlan(ABC):  # noqa: B024 - a common base, without methods in TorchRec too
    """The plan of one module."""


ModuleShardingPlan.register(EmbeddingModuleShardingPlan)


@dataclass
class ObjectPoolShardingPlan(ModuleShardingPlan):
    """The plan of a pool of objects.

    Args:
        sharding_type: its scheme.
        inference: whether it serves.
        memory_capacity_per_rank: rows of each rank. Default: equal shares.
    """

    sharding_type: ObjectPoolShardingType
    inference: bool = False
    memory_capacity_per_rank: list[int] | None = None


class ShardingPlanner(ABC):
    """What plans: a class with `plan` and `collective_plan`."""

    @abstractmethod
    def plan(self, module: nn.Module, sharders: list[Any]) -> ShardingPlan:
        """A plan for the module's collections."""

    @abstractmethod
    def collective_plan(self, module: nn.Module, sharders: list[Any]) -> ShardingPlan:
        """The same plan on all ranks. Collective."""

    @classmethod
    def __subclasshook__(cls, kind: type) -> Any:
        if cls is ShardingPlanner and all(hasattr(kind, name) for name in ("plan", "collective_plan")):
            return True
        return NotImplemented


@dataclass
class ShardingBucketMetadata:
    """Buckets of a table whose row shards have whole buckets.

    Args:
        num_buckets_per_shard: buckets of each shard.
        bucket_offsets_per_shard: first bucket of each shard.
        bucket_size: rows of a bucket.
    """

    num_buckets_per_shard: list[int]
    bucket_offsets_per_shard: list[int]
    bucket_size: int


# ---- awaitables ----


class GetItemLazyAwaitable(LazyAwaitable[V], Generic[V, K]):
    """One item of a result that is pending. Its first use waits for the result.

    Args:
        parent: awaits the result.
        key: of the item.
    """

    def __init__(self, parent: LazyAwaitable[Any], key: K) -> None:
        super().__init__()
        self._parent, self._key = parent, key

    def _wait_impl(self) -> V:
        item: V = self._parent.wait()[self._key]
        return item


class LazyGetItemMixin(Generic[K, V]):
    """Makes the items of a `LazyAwaitable` lazy. List it before `LazyAwaitable` in the bases.

    >>> class Rows(LazyGetItemMixin[str, Tensor], LazyAwaitable[dict[str, Tensor]]):
    ...     def _wait_impl(self):
    ...         return {"a": torch.ones(1)}
    >>> Rows()["a"] + 1
    tensor([2.])
    """

    def __getitem__(self, key: K) -> GetItemLazyAwaitable[V, K]:
        assert isinstance(self, LazyAwaitable)
        return GetItemLazyAwaitable(self, key)


class DeviceToHostTensorAwaitable(LazyAwaitable[Tensor]):
    """A tensor on its way to the host. The copy is issued at once, and the first use waits for it.

    Args:
        tensor: on any device.
    """

    def __init__(self, tensor: Tensor) -> None:
        super().__init__()
        self._event = None
        self._host = tensor.to("cpu", non_blocking=True)
        if tensor.device.type == "cuda":
            self._event = torch.cuda.current_stream(tensor.device).record_event()

    def _wait_impl(self) -> Tensor:
        if self._event is not None:
            self._event.synchronize()
        return self._host


# ---- contexts ----


class NullShardedModuleContext(Multistreamable):
    """The context of a module whose stages share nothing."""

    def record_stream(self, stream: Any) -> None:
        """Has nothing to record."""


class NullShardingContext(NullShardedModuleContext):
    """The same of one scheme."""


# ---- codecs ----


class QuantizedCommCodec(Generic[QuantizationContext]):
    """Interface of a codec of messages."""

    def encode(self, input_tensor: Tensor, ctx: QuantizationContext | None = None) -> Tensor:
        """What is sent."""
        raise NotImplementedError

    def decode(self, input_grad: Tensor, ctx: QuantizationContext | None = None) -> Tensor:
        """What is received, in FP32."""
        raise NotImplementedError

    @property
    def quantized_dtype(self) -> torch.dtype:
        """Dtype of a message."""
        raise NotImplementedError

    def calc_quantized_size(self, input_len: int, ctx: QuantizationContext | None = None) -> int:
        """Elements of a message of `input_len` numbers."""
        raise NotImplementedError

    def create_context(self) -> QuantizationContext | None:
        """A context, for a codec that needs one."""
        raise NotImplementedError


class NoOpQuantizedCommCodec(Generic[QuantizationContext]):
    """Sends tensors unchanged.

    >>> NoOpQuantizedCommCodec().encode(torch.ones(1))
    tensor([1.])
    """

    def encode(self, input_tensor: Tensor, ctx: QuantizationContext | None = None) -> Tensor:
        """The tensor itself."""
        return input_tensor

    def decode(self, input_grad: Tensor, ctx: QuantizationContext | None = None) -> Tensor:
        """The tensor itself."""
        return input_grad

    def quantized_dtype(self) -> torch.dtype:
        """FP32."""
        return torch.float32

    def calc_quantized_size(self, input_len: int, ctx: QuantizationContext | None = None) -> int:
        """`input_len`."""
        return input_len

    def create_context(self) -> QuantizationContext | None:
        """None."""
        return None

    def padded_size(
        self, input_tensor: Tensor, dim_per_rank: list[int], my_rank: int, qcomm_ctx: QuantizationContext
    ) -> tuple[int, int]:
        """Columns of the message of a rank, and of their padding: the tensor's own, and 0."""
        return dim_per_rank[my_rank] if input_tensor.dim() > 1 else input_tensor.shape[0], 0


# ---- devices and memory ----


def rank_device(device_type: str, rank: int) -> torch.device:
    """The device of a rank: its GPU, or the CPU.

    >>> rank_device("cpu", 3)
    device(type='cpu')
    """
    return torch.device("cpu" if device_type == "cpu" else f"{device_type}:{rank}")


def get_tensor_size_bytes(t: Tensor) -> int:
    """Bytes of a tensor's elements."""
    return t.numel() * t.element_size()


_IN_HOST = {
    StorageUsageType.BASE: ("fused_uvm", "fused_uvm_caching"),
    StorageUsageType.BASE_QUANT: ("quant_uvm", "quant_uvm_caching"),
    StorageUsageType.DEFAULT: (),
}


def compute_storage_usage(
    tensor: Tensor, compute_device_type: str, compute_kernel: str, storage_usage_type: StorageUsageType
) -> dict[str, int]:
    """Bytes of a table by the memory that stores them.

    Args:
        tensor: the table ``[E, D]``.
        compute_device_type: ``"cuda"`` or ``"cpu"``.
        compute_kernel: its kernel; some store rows in host memory.
        storage_usage_type: the sharder. A quantized one adds 4 bytes of scale and bias to a row.

    >>> compute_storage_usage(torch.empty(10, 4), "cuda", "fused", StorageUsageType.BASE)
    {'hbm': 160}
    """
    size = get_tensor_size_bytes(tensor)
    if storage_usage_type is StorageUsageType.BASE_QUANT:
        size += 4 * tensor.shape[0]
    in_host = compute_device_type == "cpu" or compute_kernel in _IN_HOST[storage_usage_type]
    return {(ParameterStorage.DDR if in_host else ParameterStorage.HBM).value: size}


class ShardingEnv2D(ShardingEnv):
    """The ranks of one sharding group, and the groups around it.

    `world_size` and `rank` are those of the sharding group. `process_group` is the group of all ranks, with
    `global_world_size` and `global_rank`.

    Args:
        sharding_pg: ranks that share one copy of the tables.
        replica_pg: ranks that store the same shards.
        global_pg: all ranks.
        device_mesh: a mesh ``[R replicas, S ranks]`` of dimensions "replicate" and "shard".
        node_group_size: ranks of the sharding group that count as a node. Default: those of a node.
        use_inter_host_allreduce, sharding_strategy: as of `DMPCollection`.

    Raises:
        ValueError: a mesh without two dimensions.
    """

    sharding_pg: Any
    replica_pg: Any
    device_mesh: Any
    node_group_size: int | None
    use_inter_host_allreduce: bool
    sharding_strategy: Any

    def __init__(
        self,
        sharding_pg: Any,
        replica_pg: Any,
        global_pg: Any,
        device_mesh: Any,
        node_group_size: int | None = None,
        use_inter_host_allreduce: bool = False,
        sharding_strategy: Any = ShardingStrategy.DEFAULT,
    ) -> None:
        if device_mesh.ndim != 2:
            raise ValueError(
                f"device_mesh has {device_mesh.ndim} dimensions. Fix: init_device_mesh(device, (replicas, ranks), "
                f"mesh_dim_names=('replicate', 'shard'))"
            )
        super().__init__(sharding_pg.size(), sharding_pg.rank(), sharding_pg, True, local_size=node_group_size)
        own = {
            "sharding_pg": sharding_pg,
            "replica_pg": replica_pg,
            "global_pg": global_pg,
            "device_mesh": device_mesh,
            "node_group_size": node_group_size,
            "use_inter_host_allreduce": use_inter_host_allreduce,
            "sharding_strategy": sharding_strategy,
        }
        for name, value in own.items():
            object.__setattr__(self, name, value)

    global_pg: Any

    @property
    def process_group(self) -> Any:
        """The group of all ranks."""
        return self.global_pg

    @property
    def global_world_size(self) -> int:
        """Number of all ranks."""
        size: int = self.global_pg.size()
        return size

    @property
    def global_rank(self) -> int:
        """This rank in the group of all."""
        rank: int = self.global_pg.rank()
        return rank

    def num_sharding_groups(self) -> int:
        """Copies of the tables."""
        return self.global_world_size // self.world_size

    def remap_rank(self, rank: int, sharding_type: Any) -> int:
        """The rank in a sharding group of a rank in the group of all.

        Args:
            rank: in the group of all.
            sharding_type: table_wise, column_wise or grid_shard.

        Raises:
            ValueError: another scheme, whose plans have the ranks of a sharding group.
        """
        name = str(getattr(sharding_type, "value", sharding_type))
        if name not in ("table_wise", "column_wise", "grid_shard"):
            raise ValueError(f"ranks of {name} are not remapped. Fix: use the rank in the sharding group")
        return rank % self.world_size if self.use_inter_host_allreduce else rank // self.num_sharding_groups()
