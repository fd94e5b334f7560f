"""Cross networks: layers that multiply features with each other. Each layer raises the degree by one.

    x_0 [B, N] --+------------+------------+
                 v            v            v          each layer:  x_{l+1} = x_0 * (W_l x_l + b_l) + x_l
                layer 0 ---> layer 1 ---> layer 2     after L layers: polynomials of degree L + 1

Wang et al. 2021, "DCN V2", arXiv 2008.13535: the full rank form (eq. 1), the low-rank one ``W = U V`` (section 3.3),
the mixture of low-rank experts (eq. 4); and the vector form of Wang et al. 2017, arXiv 1708.05123 (eq. 3).

Names, arguments and parameters are those of TorchRec, so that a state dict of its layers loads here.

Shape letters: B batch, N features in a row, R rank, E experts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.fx import wrap
from torch.nn import functional

from recshard_lab.arguments import names_wrong_arguments


class _Drawn(nn.ParameterList):
    """One parameter per layer. `reset_parameters` initializes them after they were moved from ``meta``."""

    def __init__(
        self, layers: int, shape: Sequence[int], draw: Callable[[Tensor], Tensor], device: torch.device | str | None
    ) -> None:
        super().__init__(nn.Parameter(torch.empty(*shape, device=device)) for _ in range(layers))
        self._draw = draw
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initializes every layer."""
        for parameter in self:
            if not parameter.is_meta:
                self._draw(parameter)


def _kernels(layers: int, shape: Sequence[int], device: torch.device | str | None) -> _Drawn:
    return _Drawn(layers, shape, nn.init.xavier_normal_, device)


def _biases(layers: int, shape: Sequence[int], device: torch.device | str | None) -> _Drawn:
    return _Drawn(layers, shape, nn.init.zeros_, device)


class _Cross(nn.Module):
    """The loop over layers, which all forms share. A form has `_layer`, and the names of its layers' parameters."""

    _parameter_names: ClassVar[tuple[str, ...]] = ("kernels", "bias")

    def __init__(self, in_features: int, num_layers: int, **at_least_one: int) -> None:
        super().__init__()
        for name, value in {"in_features": in_features, "num_layers": num_layers, **at_least_one}.items():
            if isinstance(value, bool) or not 1 <= int(value) < 1 << 31:
                raise ValueError(f"{type(self).__name__}: {name} must be at least 1 and below 2**31, got {value}")
        self.in_features, self._num_layers = in_features, num_layers

    def forward(self, input: Tensor) -> Tensor:
        """``[B, N] -> [B, N]``"""
        first = crossed = _checked(input, self.in_features, type(self).__name__)
        for parameters in zip(*(getattr(self, name) for name in self._parameter_names), strict=True):
            crossed = self._layer(first, crossed, *parameters)
        return crossed

    def _layer(self, first: Tensor, crossed: Tensor, *parameters: Tensor) -> Tensor:
        """``x_{l+1}`` from ``x_0`` and ``x_l``."""
        raise NotImplementedError


@wrap  # one node in an fx graph
def _checked(input: Tensor, in_features: int, name: str) -> Tensor:
    if input.dim() != 2 or input.shape[1] != in_features:
        raise ValueError(
            f"{name} was built for [B, {in_features}], got {list(input.shape)}. Fix: flatten the features of a sample "
            f"into one row"
        )
    return input


@names_wrong_arguments
class CrossNet(_Cross):
    """Full-rank cross layers: ``x_{l+1} = x_0 * (W_l x_l + b_l) + x_l``, each W ``[N, N]``.

    Args:
        in_features: N.
        num_layers: number of layers.
        device: of the weights.

    Raises:
        ValueError: fewer than one feature or layer.

    >>> CrossNet(6, num_layers=2)(torch.zeros(3, 6)).shape
    torch.Size([3, 6])
    """

    def __init__(self, in_features: int, num_layers: int, device: torch.device | str | None = None) -> None:
        super().__init__(in_features, num_layers)
        self.kernels = _kernels(num_layers, (in_features, in_features), device)
        self.bias = _biases(num_layers, (in_features, 1), device)

    def _layer(self, first: Tensor, crossed: Tensor, *parameters: Tensor) -> Tensor:
        kernel, bias = parameters
        return torch.addcmul(crossed, first, functional.linear(crossed, kernel, bias.squeeze(1)))


@names_wrong_arguments
class LowRankCrossNet(_Cross):
    """Cross layers of rank R: ``x_{l+1} = x_0 * (W_l (V_l x_l) + b_l) + x_l`` with W ``[N, R]`` and V ``[R, N]``.

    Args:
        in_features: N.
        num_layers: number of layers.
        low_rank: R. A layer has 2 N R + N weights in place of N^2 + N: fewer where R < N / 2.
        device: of the weights.

    Raises:
        ValueError: fewer than one feature, layer or rank.

    >>> net = LowRankCrossNet(6, num_layers=2, low_rank=2)
    >>> net(torch.zeros(3, 6)).shape, sum(p.numel() for p in net.parameters())
    (torch.Size([3, 6]), 60)
    """

    _parameter_names = ("W_kernels", "V_kernels", "bias")

    def __init__(
        self, in_features: int, num_layers: int, low_rank: int = 1, device: torch.device | str | None = None
    ) -> None:
        super().__init__(in_features, num_layers, low_rank=low_rank)
        self.W_kernels = _kernels(num_layers, (in_features, low_rank), device)
        self.V_kernels = _kernels(num_layers, (low_rank, in_features), device)
        self.bias = _biases(num_layers, (in_features,), device)

    def _layer(self, first: Tensor, crossed: Tensor, *parameters: Tensor) -> Tensor:
        up, down, bias = parameters
        return torch.addcmul(crossed, first, functional.linear(functional.linear(crossed, down), up, bias))


@names_wrong_arguments
class VectorCrossNet(_Cross):
    """Cross layers of one vector each (DCN's first version): ``x_{l+1} = x_0 (x_l . w_l) + b_l + x_l``.

    Args:
        in_features: N.
        num_layers: number of layers.
        device: of the weights.

    Raises:
        ValueError: fewer than one feature or layer.

    >>> VectorCrossNet(6, num_layers=2)(torch.zeros(3, 6)).shape
    torch.Size([3, 6])
    """

    def __init__(self, in_features: int, num_layers: int, device: torch.device | str | None = None) -> None:
        super().__init__(in_features, num_layers)
        self.kernels = _kernels(num_layers, (in_features, 1), device)
        self.bias = _biases(num_layers, (in_features, 1), device)

    def _layer(self, first: Tensor, crossed: Tensor, *parameters: Tensor) -> Tensor:
        kernel, bias = parameters
        return torch.addcmul(crossed + bias.squeeze(1), first, crossed @ kernel)


@names_wrong_arguments
class LowRankMixtureCrossNet(_Cross):
    """Cross layers of E low-rank experts, weighed by a softmax gate over the layer's input::

        expert_e(x) = x_0 * (U_e g(C_e g(V_e x)) + b)
        x_{l+1}     = sum over e of softmax(x_l . gate)_e expert_e(x_l)  +  x_l

    U ``[E, N, R]``, C ``[E, R, R]`` and V ``[E, R, N]`` belong to one layer. Its experts share a bias. All layers share
    the gates.

    Args:
        in_features: N.
        num_layers: number of layers.
        num_experts: E. With 1 there is no gate.
        low_rank: R.
        activation: g.
        device: of the weights.

    Raises:
        ValueError: fewer than one feature, layer, expert or rank.

    >>> LowRankMixtureCrossNet(6, num_layers=2, num_experts=3, low_rank=2)(torch.zeros(3, 6)).shape
    torch.Size([3, 6])
    """

    _parameter_names = ("U_kernels", "C_kernels", "V_kernels", "bias")

    def __init__(
        self,
        in_features: int,
        num_layers: int,
        num_experts: int = 1,
        low_rank: int = 1,
        activation: nn.Module | Callable[[Tensor], Tensor] = torch.relu,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__(in_features, num_layers, num_experts=num_experts, low_rank=low_rank)
        self._num_experts, self._activation = num_experts, activation
        self.U_kernels = _kernels(num_layers, (num_experts, in_features, low_rank), device)
        self.V_kernels = _kernels(num_layers, (num_experts, low_rank, in_features), device)
        self.bias = _biases(num_layers, (in_features, 1), device)
        gates = num_experts if num_experts > 1 else 0
        self.gates = nn.ModuleList(nn.Linear(in_features, 1, bias=False, device=device) for _ in range(gates))
        self.C_kernels = _kernels(num_layers, (num_experts, low_rank, low_rank), device)

    def _layer(self, first: Tensor, crossed: Tensor, *parameters: Tensor) -> Tensor:
        up, inner, down, bias = parameters
        low = self._activation(torch.einsum("bn,ern->ebr", crossed, down))
        mixed = self._activation(torch.bmm(low, inner.transpose(1, 2)))
        experts = first * (torch.bmm(mixed, up.transpose(1, 2)) + bias.squeeze(1))  # [E, B, N]
        if self._num_experts == 1:
            return crossed + experts[0]
        shares = torch.cat([gate(crossed) for gate in self.gates], 1).softmax(1)
        return crossed + torch.einsum("ebn,be->bn", experts, shares)
