"""Converts state dicts between this library's models and TorchRec's.

Only DLRM, DLRM_DCN, MLP and Perceptron have other names here; all other modules have TorchRec's names:

    here                                        TorchRec
    embedding_bag_collection.embedding_bags     sparse_arch.embedding_bag_collection.embedding_bags
    dense_arch.mlp.layers.0.weight              dense_arch.model._mlp.0._linear.weight
    dense_arch.mlp.activations.0                dense_arch.model._mlp.0._activation_fn
    over_arch.mlp.layers.0.weight               over_arch.model.0._mlp.0._linear.weight
    over_arch.out.weight                        over_arch.model.1.weight

Under ``install()``, ``torchrec`` has models with TorchRec's names, which need no conversion.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from recshard_lab.models import DLRM, MLP, DenseArch, OverArch, Perceptron

_RENAMED: tuple[tuple[type[nn.Module], tuple[tuple[str, str], ...]], ...] = (
    (DLRM, (("embedding_bag_collection.", "sparse_arch.embedding_bag_collection."),)),
    (DenseArch, (("mlp.", "model."),)),
    (OverArch, (("mlp.", "model.0."), ("out.", "model.1."))),
    (Perceptron, (("linear.", "_linear."), ("activation.", "_activation_fn."))),
)
"""Class -> (prefix here, prefix in TorchRec) of names in its state dict."""


def torchrec_parameter_names(model: nn.Module) -> dict[str, str]:
    """The name in TorchRec of each entry of a model's state dict.

    Args:
        model: a model of this library, sharded or not, without a wrapper around it.

    >>> list(torchrec_parameter_names(MLP(3, [2])).items())[0]
    ('layers.0.weight', '_mlp.0._linear.weight')
    """
    return {name: _name_in(model, name) for name in model.state_dict()}


def state_dict_to_torchrec(model: nn.Module, state_dict: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """A state dict with TorchRec's names, for ``load_state_dict`` of TorchRec's model. Tensors are not copied.

    Args:
        model: a model of this library.
        state_dict: of the model. Default: its current one.

    >>> list(state_dict_to_torchrec(MLP(3, [2])))
    ['_mlp.0._linear.weight', '_mlp.0._linear.bias']
    """
    names = torchrec_parameter_names(model)
    found = model.state_dict() if state_dict is None else state_dict
    return {names.get(name, name): value for name, value in found.items()}


def state_dict_from_torchrec(model: nn.Module, state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """A state dict of TorchRec's model with the names of this library, for ``model.load_state_dict``.

    Args:
        model: the model that will load it.
        state_dict: of TorchRec's model. Names that the model lacks are kept. Tensors are not copied.

    >>> model = MLP(3, [2])
    >>> list(state_dict_from_torchrec(model, state_dict_to_torchrec(model)))
    ['layers.0.weight', 'layers.0.bias']
    """
    names = {theirs: ours for ours, theirs in torchrec_parameter_names(model).items()}
    return {names.get(name, name): value for name, value in state_dict.items()}


def _name_in(module: nn.Module, name: str) -> str:
    """TorchRec's name of an entry of one module's state dict."""
    if isinstance(module, MLP):
        kind, number, rest = name.split(".", 2)
        return f"_mlp.{number}.{'_linear' if kind == 'layers' else '_activation_fn'}.{rest}"
    ours = theirs = ""
    for owner, prefixes in _RENAMED:
        if isinstance(module, owner):
            ours, theirs = next((pair for pair in prefixes if name.startswith(pair[0])), ("", ""))
    if not ours:
        child, dot, _ = name.partition(".")
        if not dot or child not in dict(module.named_children()):
            return name
        ours = theirs = f"{child}{dot}"
    return theirs + _name_in(module.get_submodule(ours.removesuffix(".")), name.removeprefix(ours))
