"""Refuses collections and parameters that a model has twice: sharding replaces one of them, and the other stays."""

from collections.abc import Mapping

from torch import nn


def refuse_second_names(model: nn.Module, modules: Mapping[str, nn.Module]) -> None:
    """Raises ValueError if the model has one of these modules under a second name.

    Args:
        model: has the modules.
        modules: path -> module that is to be replaced.
    """
    paths: dict[int, str] = {}
    for path, module in modules.items():
        paths.setdefault(id(module), path)
    for path, module in model.named_modules(remove_duplicate=False):
        first = paths.get(id(module), path)
        if first != path:
            raise ValueError(
                f"{type(module).__name__} {first!r} is also {path!r} in the model: sharding would replace it under one "
                f"name and leave its unsharded tables under the other. Fix: register it once, and pass its output to "
                f"the modules that use it"
            )


def refuse_second_owners(model: nn.Module, collections: Mapping[str, nn.Module]) -> None:
    """Raises ValueError if the model has a parameter or buffer of one of these collections under a second name.

    Args:
        model: has the collections.
        collections: path -> collection that is to be sharded.
    """
    tensors = {id(tensor) for own in collections.values() for tensor in (*own.parameters(), *own.buffers())}
    names: dict[int, str] = {}
    for name, tensor in (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)):
        if id(tensor) in tensors and names.setdefault(id(tensor), name) != name:
            raise ValueError(
                f"{names[id(tensor)]!r} and {name!r} are one tensor: sharding would split the table's and leave the "
                f"other as it is, so both would train apart. Fix: give them separate parameters, or do not shard the "
                f"collection"
            )
