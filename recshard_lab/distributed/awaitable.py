"""Awaitable results with TorchRec's names, and the outputs of sharded collections.

A `LazyAwaitable` waits when its result is first used. A sharded collection returns a KeyedTensor, or a dict of
JaggedTensors, whose rows are waited for when they are first used; ``.wait()`` waits at once.
"""

from __future__ import annotations

import operator
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from recshard_lab.sparse import JaggedTensor, KeyedTensor
from recshard_lab.sparse.jagged_tensor import register_like_jagged_tensor
from recshard_lab.sparse.keyed_tensor import register_like_keyed_tensor
from recshard_lab.sparse.trees import register

# Where ``torch.compile`` breaks the graph: at sharded lookups and at the replication of the dense part.


F = TypeVar("F", bound=Callable[..., Any])


def eager(method: F) -> F:
    """Runs a method uncompiled, with all that it calls.

    ``torch.compiler.disable`` imports ``torch._dynamo``, which takes 0.6-4 s. This decorator does so only if something
    else has imported it.
    """
    disabled: list[Callable[..., Any]] = []

    @wraps(method)
    def run(*args: Any, **kwargs: Any) -> Any:
        if "torch._dynamo" not in sys.modules:
            return method(*args, **kwargs)
        if not disabled:
            disabled.append(torch.compiler.disable(method))
        return disabled[0](*args, **kwargs)

    run._torchdynamo_disable = True  # type: ignore[attr-defined]
    return run  # type: ignore[return-value]


W = TypeVar("W")
_NOTHING: Any = object()


class Awaitable(ABC, Generic[W]):
    """A pending result: `wait` returns it.

    A subclass implements ``_wait_impl``. Each of `callbacks` receives the result and returns the next one.
    """

    def __init__(self) -> None:
        self._callbacks: list[Callable[[W], W]] = []

    @abstractmethod
    def _wait_impl(self) -> W:
        """The result, before the callbacks."""

    @property
    def callbacks(self) -> list[Callable[[W], W]]:
        """Functions that are applied to the result, in order. You may append to the list."""
        return self._callbacks

    def wait(self) -> W:
        """Blocks until the result is complete, and returns it."""
        result = self._wait_impl()
        for callback in self._callbacks:
            result = callback(result)
        return result


class NoWait(Awaitable[W]):
    """A complete result.

    >>> NoWait(3).wait()
    3
    """

    def __init__(self, obj: W) -> None:
        super().__init__()
        self._obj = obj

    def _wait_impl(self) -> W:
        return self._obj


class Later(Awaitable[W]):
    """The result of a function, which `wait` calls.

    >>> Later(lambda: 3).wait()
    3
    """

    def __init__(self, result: Callable[[], W]) -> None:
        super().__init__()
        self._compute = result

    def _wait_impl(self) -> W:
        return self._compute()


class LazyAwaitable(Awaitable[W]):
    """Waits when it is first used: by attribute, by operator, or as an argument of a torch function.

    >>> class Ones(LazyAwaitable[Any]):
    ...     def _wait_impl(self):
    ...         import torch
    ...         return torch.ones(2)
    >>> (Ones() + 1).tolist(), Ones().shape
    ([2.0, 2.0], torch.Size([2]))
    """

    def __init__(self) -> None:
        super().__init__()
        self._result: Any = _NOTHING

    def wait(self) -> W:
        """The result. The first call waits."""
        if self._result is _NOTHING:
            self._result = super().wait()
        return self._result

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in ("_result", "_callbacks"):  # not set: `__init__` was not called
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        return getattr(self.wait(), name)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        args, kwargs = tree_map(_arrived, (tuple(args), dict(kwargs or {})))
        return func(*args, **kwargs)


def _arrived(value: Any) -> Any:
    return value.wait() if isinstance(value, LazyAwaitable) else value


class LazyNoWait(LazyAwaitable[W]):
    """A complete result with the type of a lazy one.

    >>> LazyNoWait([1, 2])[1]
    2
    """

    def __init__(self, obj: W) -> None:
        super().__init__()
        self._obj = obj

    def _wait_impl(self) -> W:
        return self._obj


def _forward(name: str, apply: Callable[..., Any]) -> None:
    def method(self: LazyAwaitable[Any], *others: Any) -> Any:
        return apply(self.wait(), *map(_arrived, others))

    def swapped(self: LazyAwaitable[Any], other: Any) -> Any:
        return apply(_arrived(other), self.wait())

    setattr(LazyAwaitable, f"__{name}__", method)
    if name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul"):
        setattr(LazyAwaitable, f"__r{name}__", swapped)


for _name in ["getitem", "contains", "neg", "abs", "add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul"]:
    _forward(_name, getattr(operator, _name))
_forward("len", len)
_forward("iter", iter)


class _WaitsAtFirstUse:
    """A tensor whose values are waited for when they are first used."""

    _wait: Callable[[], Tensor]

    @classmethod
    def pending(cls, wait: Callable[[], Tensor], **fields: Any) -> Any:
        """Of values that ``wait`` returns, with gradients on or off as they are now; the other fields are known."""
        gradients, inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()

        def waits() -> Tensor:
            with torch.inference_mode(inference), torch.set_grad_enabled(gradients):
                return wait()

        lazy: Any = cls._unchecked(values=_NOTHING, **fields)  # type: ignore[attr-defined]
        lazy._wait = waits
        del lazy._values
        return lazy

    @eager
    def __getattr__(self, name: str) -> Any:
        if name != "_values" or "_wait" not in self.__dict__:
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        self._values = self._wait()
        del self._wait
        return self._values

    def __getstate__(self) -> Any:
        self._values  # noqa: B018
        return super().__getstate__()


class LazyKeyedTensor(_WaitsAtFirstUse, KeyedTensor):
    """What a sharded `EmbeddingBagCollection` returns: waits for its rows when they are first used.

    Keys and columns are known at once. ``.wait()`` returns a plain KeyedTensor.
    """

    def wait(self) -> KeyedTensor:
        """A plain KeyedTensor of rows that have arrived."""
        return KeyedTensor._unchecked(self._keys, self._length_per_key, self._values, self._key_dim)


class LazyJaggedTensor(_WaitsAtFirstUse, JaggedTensor):
    """Rows of a sequence that are waited for when they are first used."""


class LazyDict(dict[str, JaggedTensor]):
    """What a sharded `EmbeddingCollection` returns: a dict of sequences that wait for their rows when first used."""

    def wait(self) -> dict[str, JaggedTensor]:
        """A plain dict of rows that have arrived."""
        return {
            key: JaggedTensor._unchecked(
                own.values(), own.weights_or_none(), own.lengths_or_none(), own.offsets_or_none()
            )
            for key, own in self.items()
        }


register_like_keyed_tensor(LazyKeyedTensor)
register_like_jagged_tensor(LazyJaggedTensor)
register(
    LazyDict,
    lambda node: (list(node.values()), tuple(node)),
    lambda leaves, keys: LazyDict(zip(keys, leaves, strict=True)),
    lambda keys: keys,
)
LazyAwaitable.register(LazyKeyedTensor)
LazyAwaitable.register(LazyDict)
