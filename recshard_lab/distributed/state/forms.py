"""The forms of a sharded table in state dicts: torch's ``ShardedTensor``, or a DTensor over local shards.

Both share memory with the kernels, and `torch.distributed.checkpoint` saves, loads and reshards both.
"""

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Any, Literal, TypeAlias, TypeVar, get_args

import torch

from recshard_lab.comm import ShardingEnv
from recshard_lab.distributed.state.moves import Tiles
from recshard_lab.sharding import Shard
from recshard_lab.sharding.plan.types import DDR

StateForm: TypeAlias = Literal["sharded_tensor", "dtensor"]
T = TypeVar("T")
_requested: ContextVar[StateForm | None] = ContextVar("requested form", default=None)


@contextmanager
def _within(variable: ContextVar[T], value: T) -> Iterator[None]:
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


def requested(form: StateForm | None) -> AbstractContextManager[None]:
    """State dicts have this form inside the block. None leaves each table its sharder's form.

    Raises:
        ValueError: ``form`` is not a form of state dicts.

    >>> with requested("tensor"):
    ...     pass
    Traceback (most recent call last):
    ...
    ValueError: form='tensor' is not supported. Supported: sharded_tensor, dtensor. Fix: use one of them
    """
    if form not in (None, *get_args(StateForm)):
        raise ValueError(
            f"form={form!r} is not supported. Supported: {', '.join(get_args(StateForm))}. Fix: use one of them"
        )
    return _within(_requested, form or _requested.get())


_tiers_apart: ContextVar[bool] = ContextVar("tiers apart", default=False)


def tiers_apart() -> AbstractContextManager[None]:
    """State dicts inside the block leave out the rows of tiers, which the caller saves. They are not collective: the
    caller has called `ShardedCollection.level_tables`."""
    return _within(_tiers_apart, True)


def are_tiers_apart() -> bool:
    """Whether a block of `tiers_apart` runs."""
    return _tiers_apart.get()


def form_of(default: StateForm) -> StateForm:
    """The form that `requested` sets, otherwise ``default``."""
    return _requested.get() or default


def shape_of(value: Any) -> tuple[tuple[int, ...], torch.dtype]:
    """Size and dtype of a whole tensor in any form. torch warns about the attributes of its sharded tensors."""
    if not hasattr(value, "metadata"):
        return tuple(value.shape), value.dtype
    return tuple(value.metadata().size), value.metadata().tensor_properties.dtype


def torch_call(function: str) -> Mapping[str, Any] | None:
    """Arguments and variables of a running function of ``torch.distributed.checkpoint.state_dict``, or None.

    torch passes the ``StateDictOptions`` of its callers to no method of a model, so they are read from its frame.
    """
    frame = sys._getframe(1).f_back
    while frame is not None:
        if (
            frame.f_code.co_name == function
            and frame.f_globals["__name__"] == "torch.distributed.checkpoint.state_dict"
        ):
            return frame.f_locals
        frame = frame.f_back
    return None


def check_placements(table: str, scheme: str, shards: Sequence[Shard], device: torch.device) -> None:
    """Checks that a DTensor can describe the shards of a table's weights. All ranks return or raise alike.

    Raises:
        ValueError: shards that are split along both axes, or that are in host memory beside a GPU.
    """
    fix = 'Fix: state_dict(form="sharded_tensor"), which describes any tiling'
    if _axis(shards) is None:
        raise ValueError(
            f"table {table!r} ({scheme}) is split along rows and columns, which the placements of a "
            f"DTensor cannot describe. {fix}"
        )
    if device.type != "cpu" and any(shard.tier == DDR for shard in shards):
        raise ValueError(
            f"table {table!r} has shards in host memory, and a DTensor on {device.type} would copy them. {fix}"
        )


def _axis(shards: Sequence[Shard]) -> int | None:
    """The axis along which a matrix is split: 0 rows, 1 columns, -1 none; None for both.

    >>> _axis([Shard(0, (0, 4), (0, 1)), Shard(1, (0, 4), (1, 2))])
    1
    """
    if len(shards) == 1:
        return -1
    if len({shard.cols for shard in shards}) == 1:
        return 0
    return 1 if len({shard.rows for shard in shards}) == 1 else None


def dtensor(
    tiles: Tiles,
    size: tuple[int, int],
    env: ShardingEnv,
    device: torch.device,
    matrix: bool = True,
) -> Any:
    """A DTensor over torch's ``LocalShardsWrapper`` on a one-dimensional mesh of all ranks, as TorchRec returns it.

    The placement is ``Replicate()`` for one shard, ``Shard(0)`` for row shards and ``Shard(1)`` for column shards.
    ``to_local().local_shards()`` and ``.local_offsets()`` are this rank's shards, of any size and number. torch does
    not gather them: ``full_tensor()`` and the DTensor's ``dtype`` (always torch's default) are unreliable.

    Args:
        tiles: the matrix, split along one axis (`check_placements`).
        size: size of the whole matrix.
        env: the ranks.
        device: the rank's device.
        matrix: whether the result has two axes; False turns a single column into one axis.
    """
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Placement, Replicate
    from torch.distributed.tensor import Shard as Split
    from torch.distributed.tensor._shards_wrapper import LocalShardsWrapper

    shards, tensors, axis = tiles.shards, tiles.tensors, _axis(tiles.shards)
    assert axis is not None, "check_placements precedes"
    axes = 2 if matrix else 1
    wrapper = LocalShardsWrapper(
        [tensor if matrix else tensor.view(-1) for tensor in tensors.values()],
        [(shards[position].rows[0], shards[position].cols[0])[:axes] for position in tensors],
    )
    placement: Placement = Replicate() if axis < 0 else Split(axis)
    whole = DTensor.from_local(
        wrapper,
        DeviceMesh.from_group(env.pg, device.type),
        [placement],
        run_check=False,
        shape=torch.Size(size[:axes]),
        stride=(size[1], 1)[:axes] if matrix else (1,),
    )
    if not tensors:  # torch lists a chunk with two axes, which its loader cannot compare with one axis
        with torch.no_grad():
            local: Any = whole.to_local()
            local.storage_metadata().chunks.clear()
    return whole


def sharded_tensor(tiles: Tiles, size: tuple[int, int], env: ShardingEnv, matrix: bool = True) -> Any:
    """torch's ``ShardedTensor`` over a matrix. It shares memory with its tensors.

    Args:
        tiles: the matrix.
        size: size of the whole matrix.
        env: the ranks.
        matrix: whether the result has two axes; False turns a single column into one axis.
    """
    from torch.distributed._shard.metadata import ShardMetadata
    from torch.distributed._shard.sharded_tensor.api import ShardedTensor
    from torch.distributed._shard.sharded_tensor.metadata import ShardedTensorMetadata, TensorProperties
    from torch.distributed._shard.sharded_tensor.shard import Shard as LocalShard

    shards, tensors = tiles.shards, tiles.tensors
    kind = next((tensor.device.type for tensor in tensors.values() if tensor.device.type != "cpu"), "cpu")
    ranks = torch.distributed.get_process_group_ranks(env.pg)  # placements use ranks of the default group
    axes = 2 if matrix else 1
    metadata = []
    for position, shard in enumerate(shards):
        device = "cpu" if kind == "cpu" or shard.tier == DDR else f"{kind}:{shard.rank % env.local_world_size}"
        if position in tensors:  # a process may see only one device of its node, as number 0
            device = str(tensors[position].device)
        metadata.append(
            ShardMetadata(
                shard_offsets=[shard.rows[0], shard.cols[0]][:axes],
                shard_sizes=[shard.num_rows, shard.num_cols][:axes],
                placement=f"rank:{ranks[shard.rank]}/{device}",
            )
        )
    local = [
        LocalShard(tensor if matrix else tensor.view(-1), metadata[position]) for position, tensor in tensors.items()
    ]
    return ShardedTensor._init_from_local_shards_and_global_metadata(
        local,
        ShardedTensorMetadata(
            shards_metadata=metadata,
            size=torch.Size(size[:axes]),
            tensor_properties=TensorProperties(dtype=tiles.dtype, requires_grad=False),
        ),
        process_group=env.pg,
    )
