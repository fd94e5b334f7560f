"""TorchRec's MLP: `recshard_lab.models.MLP` under TorchRec's parameter names, ``_mlp.0._linear.weight``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

from recshard_lab.compat.modules.utils import extract_module_or_tensor_callable
from recshard_lab.models.layers import activation_named

Activation = str | nn.Module | Callable[[], nn.Module] | Callable[[Tensor], Tensor]


class Perceptron(nn.Module):
    """One linear layer and an activation. Parameters are named ``_linear.weight`` and ``_linear.bias``.

    Args:
        in_size, out_size: widths.
        bias: whether the layer has a bias.
        activation: a module or a function, applied to the output.
        device, dtype: of the weights.

    >>> list(Perceptron(3, 2).state_dict())
    ['_linear.weight', '_linear.bias']
    """

    def __init__(
        self,
        in_size: int,
        out_size: int,
        bias: bool = True,
        activation: nn.Module | Callable[[Tensor], Tensor] = torch.relu,
        device: torch.device | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        self._linear = nn.Linear(in_size, out_size, bias=bias, device=device, dtype=dtype)
        self._activation_fn = activation

    def forward(self, input: Tensor) -> Tensor:
        """``[B, in_size] -> [B, out_size]``"""
        return self._activation_fn(self._linear(input))


class MLP(nn.Module):
    """Perceptrons in a row. Parameters are named ``_mlp.0._linear.weight`` and so on.

    Args:
        in_size: width of the input.
        layer_sizes: widths of the layers; may be empty (identity).
        bias: whether the layers have a bias.
        activation: "relu", "sigmoid" or "swish_layernorm"; a module, which all layers share; a class or function
            without arguments that returns a module, one for each layer; or a function of a tensor.
        device, dtype: of the weights.
        activation_on_last: whether the last layer has an activation.

    Raises:
        ValueError: an unknown name of an activation.

    >>> MLP(13, [8, 4])(torch.zeros(2, 13)).shape
    torch.Size([2, 4])
    """

    def __init__(
        self,
        in_size: int,
        layer_sizes: Sequence[int],
        bias: bool = True,
        activation: Activation = torch.relu,
        device: torch.device | None = None,
        dtype: torch.dtype = torch.float32,
        activation_on_last: bool = True,
    ) -> None:
        super().__init__()
        layers = []
        for number, (before, after) in enumerate(pairwise([in_size, *layer_sizes]), start=1):
            own: nn.Module | Callable[[Tensor], Tensor]
            if number == len(layer_sizes) and not activation_on_last:
                own = nn.Identity()
            elif isinstance(activation, str):
                own = activation_named(activation, after, device)
            else:
                own = extract_module_or_tensor_callable(activation)
            layers.append(Perceptron(before, after, bias, own, device, dtype))
        self._mlp = nn.Sequential(*layers)

    def forward(self, input: Tensor) -> Tensor:
        """``[B, in_size] -> [B, layer_sizes[-1]]``"""
        return self._mlp(input)
