"""The models again, written from their papers in plain torch, without this library.

Tests and loss curves compare with them. A twin has the parameters of its model under the same names,
so that weights can be copied and compared one by one.

Shape letters: B batch, F sparse features, D embedding dim.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import combinations
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

Weights = Mapping[str, Tensor]
Formula = Callable[[Weights, Tensor, list[Tensor]], Tensor]


class PlainModel(nn.Module):
    """A twin of a click model.

    Args:
        weights: name -> value, copied.
        features: (parameter, feature, mean), for each feature of each table in turn.
        formula: (weights, dense ``[B, I]``, for each feature ``[B, D]``) -> logits ``[B]``.
    """

    def __init__(self, weights: Weights, features: Sequence[tuple[str, str, bool]], formula: Formula) -> None:
        super().__init__()
        self.weights = {name: nn.Parameter(value.detach().clone()) for name, value in weights.items()}
        for number, parameter in enumerate(self.weights.values()):
            self.register_parameter(f"p{number}", parameter)
        self.features, self.formula = list(features), formula

    def tables(self) -> list[nn.Parameter]:
        """The embedding tables."""
        return [self.weights[name] for name in dict.fromkeys(name for name, _, _ in self.features)]

    def others(self) -> list[nn.Parameter]:
        """All other parameters."""
        tables = {id(table) for table in self.tables()}
        return [weight for weight in self.weights.values() if id(weight) not in tables]

    def forward(self, dense_features: Tensor, sparse_features: Any) -> Tensor:
        """dense ``[B, I]`` and ids -> logits ``[B, 1]``"""
        pooled = []
        for name, feature, mean in self.features:
            bags = sparse_features[feature]
            mode, weights = ("mean", None) if mean else ("sum", bags.weights_or_none())
            starts = functional.pad(bags.lengths().cumsum(0), (1, 0))
            table = self.weights[name]
            pooled.append(
                functional.embedding_bag(
                    bags.values(), table, starts, mode=mode, include_last_offset=True, per_sample_weights=weights
                )
            )
        return self.formula(self.weights, dense_features, pooled).unsqueeze(1)


def twin_of(model: nn.Module) -> PlainModel:
    """The plain twin of one of this library's models, unsharded, with its weights.

    Args:
        model: of two towers, with one feature a table.

    Raises:
        ValueError: a model that has none.
    """
    kind = type(model).__name__
    owned: Any = model
    if kind == "TwoTower":
        keys = [table.feature_names[0] for table in owned.embedding_bag_collection.embedding_bag_configs()]
        queries = frozenset(number for number, key in enumerate(keys) if key in owned.query_keys)
        formula: Formula = partial(two_tower, queries=queries)
    elif kind in FORMULAS:
        formula = FORMULAS[kind]
    else:
        raise ValueError(f"{kind} has no plain twin. Twins: {', '.join(FORMULAS)} and TwoTower")
    features = [
        (f"embedding_bag_collection.embedding_bags.{table.name}.weight", feature, table.pooling.value == "MEAN")
        for table in owned.embedding_bag_collection.embedding_bag_configs()
        for feature in table.feature_names
    ]
    return PlainModel(dict(model.named_parameters()), features, formula)


def _layers(weights: Weights, prefix: str) -> list[tuple[Tensor, Tensor]]:
    found: list[tuple[Tensor, Tensor]] = []
    while f"{prefix}.{len(found)}.weight" in weights:
        start = f"{prefix}.{len(found)}"
        found.append((weights[f"{start}.weight"], weights[f"{start}.bias"]))
    return found


def _rectified(weights: Weights, prefix: str, x: Tensor) -> Tensor:
    for kernel, bias in _layers(weights, prefix):
        x = (x @ kernel.T + bias).clamp(min=0)
    return x


def _bottom(weights: Weights, dense: Tensor) -> Tensor:
    if "dense_arch.constant" in weights:
        return weights["dense_arch.constant"].expand(len(dense), -1)
    return _rectified(weights, "dense_arch.mlp.layers", dense)


def _top(weights: Weights, x: Tensor) -> Tensor:
    x = _rectified(weights, "over_arch.mlp.layers", x)
    return (x @ weights["over_arch.out.weight"].T + weights["over_arch.out.bias"]).squeeze(1)


def dlrm(weights: Weights, dense: Tensor, pooled: list[Tensor]) -> Tensor:
    """Naumov et al. 2019, section 2.1: a dot product for each pair."""
    bottom = _bottom(weights, dense)
    dots = [(one * other).sum(1) for one, other in combinations([bottom, *pooled], 2)]
    return _top(weights, torch.cat([bottom, torch.stack(dots, 1)], 1))


def dlrm_dcn(weights: Weights, dense: Tensor, pooled: list[Tensor]) -> Tensor:
    """Wang et al. 2021, section 3.3: x_{l+1} = x_0 * (U_l V_l^T x_l + b_l) + x_l."""
    first = x = torch.cat([_bottom(weights, dense), *pooled], 1)
    layer, prefix = 0, "inter_arch.crossnet"
    while f"{prefix}.bias.{layer}" in weights:
        kernel = weights[f"{prefix}.W_kernels.{layer}"] @ weights[f"{prefix}.V_kernels.{layer}"]
        x = first * (x @ kernel.T + weights[f"{prefix}.bias.{layer}"]) + x
        layer += 1
    return _top(weights, x)


def deepfm(weights: Weights, dense: Tensor, pooled: list[Tensor]) -> Tensor:
    """Guo et al. 2017, equations 1, 2 and 4, pair by pair; column 0 of a row is w, the others are V."""
    rows = list(pooled)
    if "dense_fields.weight" in weights:
        rows += [dense[:, [number]] * row for number, row in enumerate(weights["dense_fields.weight"])]
    linear = torch.stack([row[:, 0] for row in rows]).sum(0)
    pairs = [(one[:, 1:] * other[:, 1:]).sum(1) for one, other in combinations(rows, 2)]
    deep = _rectified(weights, "deep.mlp.layers", torch.cat([row[:, 1:] for row in rows], 1))
    top = (deep @ weights["deep.out.weight"].T + weights["deep.out.bias"]).squeeze(1)
    return linear + torch.stack(pairs).sum(0) + top


def two_tower(weights: Weights, dense: Tensor, pooled: list[Tensor], queries: frozenset[int]) -> Tensor:
    """Yi et al. 2019, section 3: the dot product of what an MLP makes of either side's rows."""
    vectors = []
    for tower, own in (("query_proj", True), ("candidate_proj", False)):
        x = torch.cat([rows for number, rows in enumerate(pooled) if (number in queries) is own], 1)
        *hidden, (kernel, bias) = _layers(weights, f"{tower}.layers")
        for inner, shift in hidden:
            x = (x @ inner.T + shift).clamp(min=0)
        vectors.append(x @ kernel.T + bias)
    return (vectors[0] * vectors[1]).sum(1)


FORMULAS: dict[str, Formula] = {"DLRM": dlrm, "DLRM_DCN": dlrm_dcn, "DeepFMNN": deepfm}
