"""Lets torch.fx trace code that builds our objects from proxies."""

from typing import Any

from torch.fx import _symbolic_trace


class Traceable(_symbolic_trace.ProxyableClassMeta):
    """A class whose constructor, given proxies by torch.fx, becomes a node of the graph instead of an object.

    An object that was there before the tracing began, met in it, becomes an attribute of the graph's module.
    """

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if not _symbolic_trace.is_fx_symbolic_tracing():  # spares torch's own call a look at every argument, and a log
            return type.__call__(cls, *args, **kwargs)
        return super().__call__(*args, **kwargs)
