"""Counting what torch dispatches on any device; a lookup kernel counts as one operator forward and one backward."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

__all__ = ["NO_LAUNCH", "OperatorCount", "as_one_operator"]

NO_LAUNCH = frozenset(
    """detach alias empty empty_strided empty_like new_empty new_empty_strided _unsafe_view lift_fresh resize_ set_
    _local_scalar_dense _record_function_enter_new _record_function_exit _reshape_alias _pin_memory is_pinned
    record_stream _has_compatible_shallow_copy_type""".split()  # noqa: SIM905
)
"""Operators besides views that launch no kernel on a device."""


class OperatorCount(TorchDispatchMode):
    """A context in which every dispatched operator that launches a kernel is counted into `launches`, by its name.

    >>> import torch
    >>> with OperatorCount() as count:
    ...     _ = torch.ones(2).add(1).view(1, 2)
    >>> dict(count.launches)
    {'ones': 1, 'add': 1}
    """

    def __init__(self) -> None:
        super().__init__()
        self.launches: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.partition("::")[2]
        if not func.is_view and name not in NO_LAUNCH:
            self.launches[name] += 1
        return func(*args, **(kwargs or {}))

    def total(self) -> int:
        """All launches."""
        return self.launches.total()


@contextmanager
def as_one_operator(name: str) -> Iterator[Callable[[], AbstractContextManager[Any]]]:
    """Counts everything inside the block as one operator.

    Yields:
        A context inside which operators count again, for what the block calls back.
    """
    with _disable_current_modes() as modes:
        counts = [mode for mode in modes if isinstance(mode, OperatorCount)]
        for count in counts:
            count.launches[name] += 1

        @contextmanager
        def counting_again() -> Iterator[None]:
            with ExitStack() as stack:
                for count in counts:
                    stack.enter_context(count)
                yield

        yield counting_again
