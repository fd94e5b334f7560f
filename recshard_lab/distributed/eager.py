"""Where ``torch.compile`` breaks the graph: at sharded lookups and at the replication of the dense part."""

import sys
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

import torch

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
