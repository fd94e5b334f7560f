"""The device: tensors that report ``ledger:0``, compute on the CPU and count what a GPU would cost.

A `LedgerTensor` wraps a CPU tensor. Every operator on it is counted, checked, run on the CPU tensor and wrapped again.
It synchronises where CUDA does: `SYNCHRONISING` names the operators whose CUDA kernels read a size on the host, and
every blocking copy waits for its stream, in either direction.

It differs from CUDA in three ways. ``x[mask] = number`` and ``x[mask] = zero_dim_tensor`` look alike and count as no
wait. Streams do not exist. torch gives a device written in Python no pinned-memory allocator: ``pin_memory()`` works,
``torch.empty(pin_memory=True)`` and DDP's search for unused parameters do not.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import cache
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from benchmarks.apparatus.operators import NO_LAUNCH
from benchmarks.ledger.counts import (
    Block,
    Kind,
    current_kind,
    note_collective,
    note_copy,
    note_operator,
    note_sync,
)

NAME = "ledger"
DEVICE = f"{NAME}:0"

SYNCHRONISING = frozenset(
    """_local_scalar_dense nonzero argwhere masked_select equal allclose bincount histc _unique _unique2 unique_dim
    unique_consecutive unique_dim_consecutive is_nonzero combinations""".split()  # noqa: SIM905
)
"""Operators whose CUDA kernels make the host wait, for all arguments."""

_ADDRESS = 1 << 60  # no process may read there: reading a device address on the host must not give numbers
_pinned: WeakValueDictionary[int, Any] = WeakValueDictionary()
_blocks: WeakValueDictionary[int, Block] = WeakValueDictionary()
_lock = threading.RLock()


class LedgerTensor(Tensor):
    """A tensor on the device ``ledger``.

    Args:
        cpu: where its numbers are; not copied.
    """

    _cpu: Tensor
    _block: Block

    @staticmethod
    def __new__(cls, cpu: Tensor) -> LedgerTensor:
        made: LedgerTensor = Tensor._make_wrapper_subclass(
            cls,
            cpu.size(),
            strides=cpu.stride(),
            storage_offset=cpu.storage_offset(),
            dtype=cpu.dtype,
            device=torch.device(DEVICE),
            requires_grad=False,
        )
        made._cpu = cpu
        made._block = _block_of(cpu)
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        return _dispatch(func, args, kwargs or {})

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"{self._cpu!r}, on {DEVICE}"

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _rebuild, (self.detach().cpu(), self.requires_grad, isinstance(self, torch.nn.Parameter))

    def __deepcopy__(self, memo: Any) -> Any:
        if id(self) not in memo:
            if not self.is_leaf:
                raise RuntimeError("only leaf tensors can be deep-copied")
            copied: Any = self.detach().clone()
            if isinstance(self, torch.nn.Parameter):
                copied = torch.nn.Parameter(copied, self.requires_grad)
            copied.requires_grad_(self.requires_grad)
            copied.__dict__.update({k: v for k, v in self.__dict__.items() if k not in ("_cpu", "_block")})
            memo[id(self)] = copied
        return memo[id(self)]

    @property
    def data(self) -> Tensor:
        """The tensor without its history."""
        return self.detach()

    @data.setter
    def data(self, other: Tensor) -> None:
        if not isinstance(other, LedgerTensor):
            raise RuntimeError(f".data of a tensor on {DEVICE} cannot be set to one on {other.device}")
        Tensor.data.__set__(self, other)  # type: ignore[attr-defined]
        self._cpu, self._block = other._cpu, other._block

    def tolist(self) -> Any:
        """Copies to the host, as on every device."""
        return self.detach().cpu().tolist()

    def data_ptr(self) -> int:
        """An address to compare with others. The host cannot read it."""
        return _ADDRESS + self._cpu.data_ptr() if self.numel() else 0


def wrap(cpu: Tensor, kind: Kind | None = None) -> LedgerTensor:
    """A CPU tensor's memory as memory of the device, not copied."""
    made = LedgerTensor(cpu)
    if kind is not None:
        made._block.mark(kind)
    return made


def unwrap(tensor: Tensor) -> Tensor:
    """The CPU tensor that holds the numbers of a tensor of the device; other tensors as they are."""
    return tensor._cpu if isinstance(tensor, LedgerTensor) else tensor


def mark(tensor: Tensor, kind: Kind) -> None:
    """Counts a tensor's memory as this kind."""
    assert isinstance(tensor, LedgerTensor)
    tensor._block.mark(kind)


def _rebuild(cpu: Tensor, requires_grad: bool, parameter: bool) -> Tensor:
    tensor = cpu.to(DEVICE)
    return torch.nn.Parameter(tensor, requires_grad) if parameter else tensor.requires_grad_(requires_grad)


def _block_of(cpu: Tensor) -> Block:
    storage = cpu.untyped_storage()
    with _lock:
        block = _blocks.get(storage._cdata)
        if block is None:
            block = _blocks[storage._cdata] = Block(storage.nbytes(), current_kind())
    return block


# ---- dispatch ----


def _dispatch(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    space, _, name = func._schema.name.partition("::")
    flat, spec = tree_flatten((args, kwargs))
    if space == "c10d":
        return _collective(func, name, flat, spec)
    if func is torch.ops.aten.copy_.default:
        return _copy(*args, **kwargs)
    if name == "record_stream":
        return None
    _refuse_mixed(func, name, args, kwargs)
    note_operator(name, not func.is_view and name not in NO_LAUNCH)
    if _synchronises(name, args, kwargs):
        note_sync(name)
    target = _target(kwargs)
    if target is not None and target.type not in (NAME, "cpu"):
        return func(*tree_map(_unwrap_any, args), **tree_map(_unwrap_any, kwargs))
    if name == "_to_copy" and target is not None and target.type == "cpu":
        return _to_host(args[0], kwargs)
    owners = {id(leaf._cpu): leaf for leaf in flat if isinstance(leaf, LedgerTensor)}
    inner_args, inner_kwargs = tree_unflatten([_unwrap_any(leaf) for leaf in flat], spec)
    if target is not None:
        inner_kwargs["device"] = torch.device("cpu")
    if inner_kwargs.get("pin_memory"):
        inner_kwargs["pin_memory"] = False
    out = func(*inner_args, **inner_kwargs)
    for owner in owners.values():  # out= and in-place operators may give them another shape, or other memory
        if owner._cpu.shape != owner.shape or owner._cpu.stride() != owner.stride():
            owner.data = LedgerTensor(owner._cpu)
    if target is not None and target.type == "cpu":
        return out
    return tree_map(lambda leaf: _own(leaf, owners) if isinstance(leaf, Tensor) else leaf, out)


def _own(cpu: Tensor, owners: dict[int, LedgerTensor]) -> Tensor:
    """The argument that an in-place operator returns, or a new tensor."""
    return owners[id(cpu)] if id(cpu) in owners else LedgerTensor(cpu)


def _unwrap_any(leaf: Any) -> Any:
    return leaf._cpu if isinstance(leaf, LedgerTensor) else leaf


def _target(kwargs: dict[str, Any]) -> torch.device | None:
    device = kwargs.get("device")
    return None if device is None else torch.device(device)


def _refuse_mixed(func: Any, name: str, args: Any, kwargs: dict[str, Any]) -> None:
    """Raises RuntimeError where CUDA does: CPU tensors beside device ones, but for 0-dim scalars and indices."""
    for argument, value in [
        *zip(func._schema.arguments, args, strict=False),
        *((a, kwargs[a.name]) for a in func._schema.arguments if a.name in kwargs),
    ]:
        writes = argument.alias_info is not None and argument.alias_info.is_write
        for leaf in value if isinstance(value, list | tuple) else [value]:
            if not isinstance(leaf, Tensor) or isinstance(leaf, LedgerTensor):
                continue
            if argument.name == "indices" and name in ("index", "index_put", "index_put_", "_index_put_impl_"):
                note_copy(True, leaf, _is_pinned(leaf), blocking=True)
                continue
            scalar = leaf.dim() == 0 and leaf.device.type == "cpu" and name not in _NO_SCALARS
            if writes or not scalar:
                raise RuntimeError(
                    f"Expected all tensors to be on the same device, but found at least two devices, {DEVICE} and "
                    f"{leaf.device}! (argument {argument.name!r} of {func})"
                )


_NO_SCALARS = frozenset(
    "index_select index_add index_add_ gather scatter scatter_ cat embedding embedding_bag mm addmm bmm".split()  # noqa: SIM905
)


def _synchronises(name: str, args: Any, kwargs: dict[str, Any]) -> bool:
    if name in SYNCHRONISING:
        return True
    if name == "repeat_interleave":
        return kwargs.get("output_size") is None
    if name in ("index", "index_put", "index_put_", "_index_put_impl_"):
        masks = any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])
        fills = name != "index" and len(args) > 2 and args[2].dim() == 0  # a mask and one number: masked_fill
        return masks and not fills
    if name in ("permute_2D_sparse_data", "permute_1D_sparse_data"):  # fbgemm's last argument: the result's size
        return kwargs.get("permuted_lengths_sum", args[4] if len(args) > 4 else None) is None
    return False


def _to_host(source: LedgerTensor, kwargs: dict[str, Any]) -> Tensor:
    """``_to_copy`` to the CPU. A non-blocking one returns pinned memory, as on CUDA."""
    blocking = not kwargs.get("non_blocking", False)
    others = {k: v for k, v in kwargs.items() if k not in ("device", "non_blocking", "pin_memory")}
    out = torch.ops.aten._to_copy.default(source._cpu, **others)
    if not blocking:
        _note_pinned(out)
    note_copy(False, out, not blocking, blocking)
    return out


def _copy(target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    note_operator("copy_", True)
    on_device = isinstance(target, LedgerTensor), isinstance(source, LedgerTensor)
    if on_device != (True, True):
        host = source if on_device[0] else target
        if host.device.type != "cpu":
            raise RuntimeError(f"copies between {DEVICE} and {host.device} are not possible")
        pinned = _is_pinned(host)
        # a copy to pageable memory returns when it is done; one from pageable memory is staged and may return before
        waits = not non_blocking or (on_device[1] and not pinned)
        note_copy(on_device[0], host, pinned, waits)
    unwrap(target).copy_(unwrap(source))
    return target


def _collective(func: Any, name: str, flat: list[Any], spec: Any) -> Any:
    """A collective on the CPU tensors; its results are the tensors that it was given."""
    owners = {id(leaf._cpu): leaf for leaf in flat if isinstance(leaf, LedgerTensor)}
    tensors = [leaf for leaf in flat if isinstance(leaf, Tensor)]
    if any(not isinstance(leaf, LedgerTensor) for leaf in tensors):
        raise RuntimeError(f"collective {name} got tensors on {DEVICE} and on {tensors[0].device} or the CPU")
    arguments = [argument.name for argument in func._schema.arguments]
    inner_args, inner_kwargs = tree_unflatten([_unwrap_any(leaf) for leaf in flat], spec)
    source = next((n for n in ("input", "input_tensor", "input_tensors", "tensors") if n in arguments), None)
    value = inner_kwargs.get(source) if source in inner_kwargs else inner_args[arguments.index(source or arguments[0])]
    sent = [leaf for leaf in tree_flatten(value)[0] if isinstance(leaf, Tensor)]
    note_collective(name.strip("_"), sum(leaf.numel() * leaf.element_size() for leaf in sent))
    out = func(*inner_args, **inner_kwargs)
    return tree_map(lambda leaf: owners.get(id(leaf), leaf) if isinstance(leaf, Tensor) else leaf, out)


# ---- pinned memory ----


def _note_pinned(tensor: Tensor) -> None:
    storage = tensor.untyped_storage()
    _pinned[storage._cdata] = storage


def _is_pinned(tensor: Tensor) -> bool:
    return tensor.untyped_storage()._cdata in _pinned


# ---- registration ----


class _Module:
    """``torch.ledger``: what torch asks of a device's module."""

    @staticmethod
    def is_initialized() -> bool:
        return True

    @staticmethod
    def is_available() -> bool:
        return True

    @staticmethod
    def current_device() -> int:
        return 0

    @staticmethod
    def device_count() -> int:
        return 1

    @staticmethod
    def _is_in_bad_fork() -> bool:
        return False

    @staticmethod
    def manual_seed_all(seed: int) -> None:
        """The device draws from the CPU's generator."""

    @staticmethod
    def get_amp_supported_dtype() -> list[torch.dtype]:
        return [torch.float16, torch.bfloat16]

    @staticmethod
    def synchronize(device: Any = None) -> None:
        note_sync("synchronize")


def _empty(
    size: Any,
    dtype: Any = None,
    layout: Any = None,
    device: Any = None,
    pin_memory: Any = None,
    memory_format: Any = None,
) -> Tensor:
    note_operator("empty", False)
    return wrap(torch.empty(size, dtype=dtype, memory_format=memory_format or torch.contiguous_format))


def _empty_strided(
    size: Any, stride: Any, dtype: Any = None, layout: Any = None, device: Any = None, pin_memory: Any = None
) -> Tensor:
    note_operator("empty_strided", False)
    return wrap(torch.empty_strided(size, stride, dtype=dtype))


def _factory(make: Callable[..., Tensor], name: str) -> Callable[..., Tensor]:
    def made(*args: Any, device: Any = None, pin_memory: Any = None, **kwargs: Any) -> Tensor:
        note_operator(name, True)
        return wrap(make(*args, **kwargs))

    return made


def _copy_from(self: Tensor, dst: Tensor, non_blocking: bool = False) -> Tensor:
    return _copy(dst, self, non_blocking)


def _pin(self: Tensor, device: Any = None) -> Tensor:
    pinned = self.clone()
    _note_pinned(pinned)
    return pinned


@cache
def register_device() -> torch.library.Library:
    """Registers the device with torch, once. The process then has an accelerator."""
    _setup_privateuseone_for_python_backend(NAME, backend_module=_Module())
    library = torch.library.Library("aten", "IMPL")
    library.impl("empty.memory_format", _empty, "PrivateUse1")
    library.impl("empty_strided", _empty_strided, "PrivateUse1")
    for make in (torch.triu_indices, torch.tril_indices):
        library.impl(make.__name__, _factory(make, make.__name__), "PrivateUse1")
    library.impl("_copy_from", _copy_from, "PrivateUse1")
    library.impl("_pin_memory", _pin, "CPU")
    library.impl("is_pinned", lambda self, device=None: _is_pinned(self), "CPU")
    return library
