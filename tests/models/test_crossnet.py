"""The cross layers against the papers' formulas, sample by sample in double precision."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from recshard_lab.models import CrossNet, LowRankCrossNet, LowRankMixtureCrossNet, VectorCrossNet
from tests.refusals import not_refused

N, R, E, LAYERS = 5, 2, 3, 3

KINDS: dict[str, Any] = {
    "full": lambda **own: CrossNet(N, LAYERS, **own),
    "low rank": lambda **own: LowRankCrossNet(N, LAYERS, R, **own),
    "vector": lambda **own: VectorCrossNet(N, LAYERS, **own),
    "mixture": lambda **own: LowRankMixtureCrossNet(N, LAYERS, E, R, activation=torch.tanh, **own),
    "one expert": lambda **own: LowRankMixtureCrossNet(N, LAYERS, 1, R, activation=torch.sigmoid, **own),
}


def by_hand(kind: str, net: Any, x0: Tensor) -> Tensor:
    x = x0
    for layer in range(LAYERS):
        bias = net.bias[layer].flatten()
        if kind == "full":
            x = x0 * (net.kernels[layer] @ x + bias) + x
        elif kind == "low rank":
            x = x0 * (net.W_kernels[layer] @ (net.V_kernels[layer] @ x) + bias) + x
        elif kind == "vector":
            x = x0 * (x @ net.kernels[layer].flatten()) + bias + x
        else:
            g = torch.tanh if kind == "mixture" else torch.sigmoid
            experts = [
                x0 * (net.U_kernels[layer][e] @ g(net.C_kernels[layer][e] @ g(net.V_kernels[layer][e] @ x)) + bias)
                for e in range(net.U_kernels[layer].shape[0])
            ]
            scores = torch.stack([gate.weight[0] @ x for gate in net.gates]) if len(net.gates) else torch.zeros(1)
            shares = scores.exp() / scores.exp().sum()
            x = sum(share * expert for share, expert in zip(shares, experts, strict=True)) + x
    return x


def made(kind: str) -> nn.Module:
    torch.manual_seed(0)
    net: nn.Module = KINDS[kind]().double()
    with torch.no_grad():
        for name, parameter in net.named_parameters():
            if "bias" in name:  # they start as zeros
                parameter.normal_()
    return net


@pytest.mark.parametrize("kind", KINDS)
def test_each_layer_is_the_papers(kind: str) -> None:
    net, x = made(kind), torch.randn(7, N, dtype=torch.float64)
    expected = torch.stack([by_hand(kind, net, sample) for sample in x])
    assert torch.allclose(net(x), expected, rtol=1e-10, atol=1e-10)
    assert net(x[:0]).shape == (0, N)


def test_what_does_not_fit_is_refused() -> None:
    refusals: list[tuple[Any, str]] = [
        (lambda: CrossNet(4, 0), r"CrossNet: num_layers must be at least 1 and below .*, got 0"),
        (lambda: LowRankCrossNet(4, 1, 0), "LowRankCrossNet: low_rank must be at least 1"),
        (lambda: VectorCrossNet(4, 1)(torch.zeros(2, 3)), r"VectorCrossNet was built for \[B, 4\], got \[2, 3\]"),
    ]
    assert not_refused(refusals) == []
