"""Lets torch look inside the sparse classes: tree_map, DDP, torch.compile and export see their tensors.

Only tensors that are there are leaves; which they are is part of the tree's shape.
"""

import json
from collections.abc import Callable, Iterable
from typing import Any

from torch.fx._pytree import register_pytree_flatten_spec
from torch.utils._pytree import GetAttrKey, KeyEntry, register_pytree_node


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
