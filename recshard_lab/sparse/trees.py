"""Lets torch.fx trace code that builds our objects from proxies."""

import json
from collections.abc import Callable, Iterable
from typing import Any

from torch.fx import _symbolic_trace
from torch.fx._pytree import register_pytree_flatten_spec
from torch.utils._pytree import GetAttrKey, KeyEntry, register_pytree_node


class Traceable(_symbolic_trace.ProxyableClassMeta):
    """A class whose constructor, given proxies by torch.fx, becomes a node of the graph instead of an object.

    An object that was there before the tracing began, met in it, becomes an attribute of the graph's module.
    """

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if not _symbolic_trace.is_fx_symbolic_tracing():  # spares torch's own call a look at every argument, and a log
            return type.__call__(cls, *args, **kwargs)
        return super().__call__(*args, **kwargs)


# Lets torch look inside the sparse classes: tree_map, DDP, torch.compile and export see their tensors.
#
# Only tensors that are there are leaves; which they are is part of the tree's shape.


def register(
    cls: type,
    flatten: Callable[[Any], tuple[list[Any], Any]],
    unflatten: Callable[[Any, Any], Any],
    names_of: Callable[[Any], Iterable[str]],
) -> None:
    """Makes `cls` a tree node.

    Args:
        flatten: an object to its tensors (or other nodes) and a hashable context.
        unflatten: leaves (of any type) and context to an object.
        names_of: attribute name of each leaf, from the context.
    """

    def flatten_with_keys(node: Any) -> tuple[list[tuple[KeyEntry, Any]], Any]:
        leaves, context = flatten(node)
        return [(GetAttrKey(name), leaf) for name, leaf in zip(names_of(context), leaves, strict=True)], context

    register_pytree_node(
        cls,
        flatten,
        unflatten,
        flatten_with_keys_fn=flatten_with_keys,
        to_dumpable_context=json.dumps,
        from_dumpable_context=lambda text: _tuples(json.loads(text)),
        serialized_type_name=f"{cls.__module__}.{cls.__qualname__}",
    )
    register_pytree_flatten_spec(cls, lambda node, _spec: flatten(node)[0])


def _tuples(context: Any) -> Any:
    """Lists as tuples: JSON has no tuples, and a stored program compares contexts."""
    return tuple(map(_tuples, context)) if isinstance(context, list) else context
