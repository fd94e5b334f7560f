"""Awaitable results with TorchRec's names, and the results of sharded collections.

`LazyAwaitable` waits when its result is first used. A sharded collection returns a complete KeyedTensor, and code for
TorchRec may still call ``.wait()`` on it.
"""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar

from torch.utils._pytree import tree_map

from recshard_lab.sparse import JaggedTensor, KeyedTensor
from recshard_lab.sparse.keyed_tensor import register_like_keyed_tensor
from recshard_lab.sparse.pytree import register

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
        return apply(self.wait(), *(_arrived(other) for other in others))

    setattr(LazyAwaitable, name, method)


def _swapped(apply: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    return lambda ours, other: apply(other, ours)


for _name in ("getitem", "contains", "neg", "abs"):
    _forward(f"__{_name}__", getattr(operator, _name))
for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul"):
    _forward(f"__{_name}__", getattr(operator, _name))
    _forward(f"__r{_name}__", _swapped(getattr(operator, _name)))
for _name, _apply in (("len", len), ("iter", iter)):
    _forward(f"__{_name}__", _apply)


class ArrivedKeyedTensor(KeyedTensor):
    """The output of a sharded `EmbeddingBagCollection`: a KeyedTensor with TorchRec's ``.wait()``."""

    def wait(self) -> KeyedTensor:
        """This result as a plain KeyedTensor; does not wait."""
        return KeyedTensor._unchecked(self._keys, self._length_per_key, self._values, self._key_dim)


class ArrivedDict(dict[str, JaggedTensor]):
    """The output of a sharded `EmbeddingCollection`: a dict with TorchRec's ``.wait()``."""

    def wait(self) -> dict[str, JaggedTensor]:
        """This result as a plain dict; does not wait."""
        return dict(self)


register_like_keyed_tensor(ArrivedKeyedTensor)
register(
    ArrivedDict,
    lambda node: (list(node.values()), tuple(node)),
    lambda leaves, keys: ArrivedDict(zip(keys, leaves, strict=True)),
    lambda keys: keys,
)
LazyAwaitable.register(ArrivedKeyedTensor)
LazyAwaitable.register(ArrivedDict)
