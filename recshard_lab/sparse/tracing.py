"""Lets torch.fx trace code that builds our objects from proxies."""

from typing import Any

import torch
from torch.fx._symbolic_trace import ProxyableClassMeta


class Traceable(ProxyableClassMeta):
    """A class whose constructor, given proxies by torch.fx, becomes a node of the graph instead of an object.

    An object that was there before the tracing began, met in it, becomes an attribute of the graph's module.
    """

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return type.__call__(cls, *args, **kwargs)
        return super().__call__(*args, **kwargs)
