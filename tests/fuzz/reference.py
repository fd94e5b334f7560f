"""The truth: ``torch.nn.EmbeddingBag`` and ``Embedding`` in float64, and optimizers written out by hand.

With ``noise``, every rounding of the library is an error of its largest size and random sign. With u the unit roundoff
of the arithmetic (2^-24 for fp32, 2^-53 for fp64 tables), n terms of a sum and A the sum of their absolute values:

    pooled row             (n + 2) u A              products, sum, division of a mean
    row on the wire        c A a hop                c: 2^-11 fp16, 2^-8 bf16; INT8 1/255 of the largest, a row shard
    gradient of a row      (m + 3) u A + c A a hop  m occurrences, each coded
    weight's gradient      (d + 3) u A + c A
    state, update          8 u                      the formula's few operations
    weight, stored         u w; of fp16 and bf16 one ulp: the sum may fall on either side of a tie
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from recshard_lab import DataType, PoolingType
from recshard_lab.comm import CommType
from recshard_lab.embedding.kernels import TORCH_DTYPES
from tests.fuzz.batches import CURVE, bags, mixing, start_weights
from tests.fuzz.cases import Case

UNIT = {DataType.FP64: 2.0**-53}  # of the arithmetic; fp32 for all others
ULP = {DataType.FP16: 2.0**-10, DataType.BF16: 2.0**-7}
CODED = {CommType.FP32: 0.0, CommType.FP16: 2.0**-11, CommType.BF16: 2.0**-8, CommType.INT8: 1 / 255}


@dataclass
class Numbers:
    """What a run gives: step -> output -> rows of the global batch; table -> weights; gradients of per-sample weights.

    The latter by step, rank and feature.
    """

    outputs: list[dict[str, Tensor]] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)
    gradients: dict[tuple[int, int, str], Tensor] = field(default_factory=dict)


class Noise:
    """Adds errors of a given size; nothing without a seed."""

    def __init__(self, seed: int | None) -> None:
        self.generator = None if seed is None else torch.Generator().manual_seed(seed)

    def __call__(self, exact: Tensor, bound: Tensor) -> Tensor:
        if self.generator is None:
            return exact
        signs = torch.randint(0, 2, exact.shape, generator=self.generator) * 2 - 1
        return exact + signs * bound


@dataclass
class Used:
    """One output of a step: what was looked up, by rank, and the gradient of its rows."""

    table: Table
    feature: str
    sizes: list[int]  # ids of each rank
    ids: Tensor
    lengths: Tensor
    weights: Tensor
    grad: Tensor

    def of_ids(self) -> Tensor:
        """The absolute gradient of each id's row before its weight, ``[N, D]``."""
        grad = self.grad.abs()
        if self.table.case.sequence:
            return grad
        if self.table.config.pooling is PoolingType.MEAN:
            grad = grad / self.lengths.clamp(min=1).unsqueeze(1)
        return grad[torch.repeat_interleave(torch.arange(self.lengths.numel()), self.lengths)]


class Table:
    """One table, its module and its optimizer."""

    def __init__(self, case: Case, number: int, start: Tensor, noise: Noise) -> None:
        self.case, self.noise = case, noise
        self.config = case.configs()[number]
        size = (self.config.num_embeddings, self.config.embedding_dim)
        kind = nn.Embedding if case.sequence else nn.EmbeddingBag
        options: dict[str, Any] = {} if case.sequence else {"include_last_offset": True, "mode": "sum"}
        self.module = kind(*size, **options, _weight=start.double())
        self.unit = UNIT.get(self.config.data_type, 2.0**-24)
        shardings = case.shardings(self.config.name)
        self.stripes = max(len({shard.rows for shard in own.shards}) for own in shardings)
        self.hops = case.world + 1 if any(own.route == "reduce_scatter" for own in shardings) else 2
        self.dense = shardings[0].compute_kernel == "dense"
        self.state: dict[str, Tensor] = {}
        self.step_number = 0
        self.uses = torch.zeros(size[0], 1, dtype=torch.float64)
        self.sums = torch.zeros(size, dtype=torch.float64)

    def coded(self, kind: CommType, sums: Tensor) -> Tensor:
        """The largest error of a codec on rows whose terms' absolute values sum to ``sums``."""
        if kind is CommType.INT8:
            return self.hops * self.stripes * CODED[kind] * sums.amax(1, keepdim=True)
        tiny = 2.0**-25 if kind is CommType.FP16 else 0.0
        return self.hops * (CODED[kind] * sums).clamp(min=tiny)

    def look_up(self, ids: Tensor, lengths: Tensor, weights: Tensor) -> Tensor:
        """Rows of a feature of the global batch."""
        weight = self.module.weight
        if self.case.sequence:
            rows, sums, terms = self.module(ids), weight.detach().abs()[ids], torch.zeros(ids.numel(), 1)
        else:
            ends = nn.functional.pad(lengths.cumsum(0), (1, 0))
            rows = self.module(ids, ends, per_sample_weights=weights)
            bag = torch.repeat_interleave(torch.arange(lengths.numel()), lengths)
            terms = lengths.unsqueeze(1).double()
            sums = torch.zeros_like(rows).index_add(0, bag, (weight.abs()[ids] * weights.unsqueeze(1).abs()).detach())
            if self.config.pooling is PoolingType.MEAN:
                rows, sums = rows / terms.clamp(min=1), sums / terms.clamp(min=1)
        return self.noise(rows, (terms + 2) * self.unit * sums + self.coded(self.case.codecs[0], sums))

    def note(self, used: Used) -> None:
        """Adds up, for each row, how often it is used and the absolute values of its gradient's terms."""
        grad = used.of_ids() * used.weights.abs().unsqueeze(1)
        self.sums.index_add_(0, used.ids, grad)
        self.uses.index_add_(0, used.ids, torch.ones(used.ids.numel(), 1, dtype=torch.float64))

    @torch.no_grad()
    def step(self) -> None:
        """One step of the rows that the global batch names."""
        self.step_number += 1
        weight, touched = self.module.weight, self.uses.squeeze(1) > 0
        grad = weight.grad if weight.grad is not None else torch.zeros_like(weight)
        bound = (self.uses + 3) * self.unit * self.sums + self.coded(self.case.codecs[1], self.sums)
        grad = self.noise(grad, bound)[touched]
        if self.dense:
            update = -0.05 * grad
        else:
            update = FORMULAS[self.case.fused["optimizer"]](self, grad, weight[touched], touched)
        after = weight[touched] + self.noise(update, 8 * self.unit * update.abs())
        ulp = ULP.get(self.config.data_type, self.unit)
        after = self.noise(after, ulp * after.abs()).to(TORCH_DTYPES[self.config.data_type]).double()
        weight[touched] = after
        weight.grad = None
        self.uses.zero_()
        self.sums.zero_()

    # ---- what the formulas share: w, g are touched rows [U, D] ----

    def keep(self, name: str, touched: Tensor, make: Callable[[Tensor], Tensor], columns: int | None = None) -> Tensor:
        """The new value of a state of the touched rows."""
        columns = self.config.embedding_dim if columns is None else columns
        state = self.state.setdefault(name, torch.zeros(self.config.num_embeddings, columns, dtype=torch.float64))
        new = make(state[touched])
        state[touched] = self.noise(new, 4 * self.unit * (new.abs() + state[touched].abs()))
        return state[touched].clone()

    def decayed(self, g: Tensor, w: Tensor) -> Tensor:
        """With L2 decay."""
        decay = self.case.fused.get("weight_decay", 0.0)
        return self.noise(g + decay * w, self.unit * (g.abs() + decay * w.abs()))


Formula = Callable[[Table, Tensor, Tensor, Tensor], Tensor]


def sgd(table: Table, g: Tensor, w: Tensor, touched: Tensor) -> Tensor:
    return -table.case.fused["learning_rate"] * table.decayed(g, w)


def adagrad(table: Table, g: Tensor, w: Tensor, touched: Tensor) -> Tensor:
    g, fused = table.decayed(g, w), table.case.fused
    total = table.keep("sum", touched, lambda s: s + g * g)
    return -fused["learning_rate"] * g / (total.sqrt() + fused["eps"])


def row_wise_adagrad(table: Table, g: Tensor, w: Tensor, touched: Tensor) -> Tensor:
    g, fused = table.decayed(g, w), table.case.fused
    total = table.keep("sum", touched, lambda s: s + (g * g).mean(1, keepdim=True), 1)
    return -fused["learning_rate"] * g / (total.sqrt() + fused["eps"])


def _moments(table: Table, g: Tensor, touched: Tensor, by_row: bool) -> Tensor:
    """Adam's direction with unbiased moments; the second one a number a row."""
    fused, t = table.case.fused, table.step_number
    b1, b2 = fused["beta1"], fused["beta2"]
    square = (g * g).mean(1, keepdim=True) if by_row else g * g
    first = table.keep("first", touched, lambda m: b1 * m + (1 - b1) * g)
    second = table.keep("second", touched, lambda v: b2 * v + (1 - b2) * square, 1 if by_row else None)
    return first / (1 - b1**t) / ((second / (1 - b2**t)).sqrt() + fused["eps"])


def _adam(by_row: bool) -> Formula:
    def adam(table: Table, g: Tensor, w: Tensor, touched: Tensor) -> Tensor:
        fused = table.case.fused
        direction = _moments(table, g, touched, by_row) + fused.get("weight_decay", 0.0) * w  # decoupled, as AdamW
        return -fused["learning_rate"] * direction

    return adam


def _lamb(by_row: bool) -> Formula:
    def lamb(table: Table, g: Tensor, w: Tensor, touched: Tensor) -> Tensor:
        fused = table.case.fused
        direction = _moments(table, g, touched, by_row) + fused.get("weight_decay", 0.0) * w
        direction = table.noise(direction, 4 * table.unit * direction.abs())
        return -fused["learning_rate"] * _ratio(w, direction) * direction

    return lamb


def _ratio(w: Tensor, direction: Tensor) -> Tensor:
    weight, length = w.norm(dim=1, keepdim=True), direction.norm(dim=1, keepdim=True)
    return torch.where((weight > 0) & (length > 0), weight / length, torch.ones_like(weight))


def lars(table: Table, g: Tensor, w: Tensor, touched: Tensor) -> Tensor:
    fused = table.case.fused
    decay, weight, length = fused.get("weight_decay", 0.0), w.norm(dim=1, keepdim=True), g.norm(dim=1, keepdim=True)
    trust = fused["eta"] * weight / (length + decay * weight)
    trust = torch.where((weight > 0) & (length > 0), trust, torch.ones_like(trust))
    push = fused["learning_rate"] * trust * (g + decay * w)
    return -table.keep("momentum", touched, lambda m: fused["momentum"] * m + push)


FORMULAS: dict[str, Formula] = {
    "exact_sgd": sgd,
    "exact_adagrad": adagrad,
    "exact_row_wise_adagrad": row_wise_adagrad,
    "adam": _adam(by_row=False),
    "partial_row_wise_adam": _adam(by_row=True),
    "lamb": _lamb(by_row=False),
    "partial_row_wise_lamb": _lamb(by_row=True),
    "lars_sgd": lars,
}


def run(case: Case, seed: int | None = None) -> Numbers:
    """All steps of a case in one process, never moved; with a seed, with an error at every rounding."""
    noise, found = Noise(seed), Numbers()
    tables = [Table(case, number, start, noise) for number, start in enumerate(start_weights(case))]
    outputs = [(table, feature) for table in tables for feature in table.config.feature_names]
    ranks = range(case.world)
    for step in range(len(case.sizes)):
        found.outputs.append({})
        noted: list[Used] = []
        loss = torch.zeros((), dtype=torch.float64)
        leaves: dict[tuple[int, str], Tensor] = {}
        for number, (table, feature) in enumerate(outputs):
            parts = [bags(case, step, rank, feature) for rank in ranks]
            for rank, part in zip(ranks, parts, strict=True):
                plain = part.weights if case.weighted else torch.ones_like(part.weights)
                leaves.setdefault((rank, feature), plain.double().requires_grad_(case.weight_gradients))
            ids, lengths = torch.cat([own.ids for own in parts]), torch.cat([own.lengths for own in parts])
            weights = torch.cat([leaves[rank, feature] for rank in ranks])
            rows = table.look_up(ids, lengths, weights)
            mix = mixing(case, step, number, *rows.shape)
            loss = loss + (rows * (mix + CURVE * rows.detach())).sum()
            found.outputs[-1][f"{table.config.name} {feature}"] = rows.detach()
            grad = (mix + CURVE * rows).detach()
            noted.append(Used(table, feature, [own.ids.numel() for own in parts], ids, lengths, weights.detach(), grad))
        loss.backward()
        for used in noted:
            used.table.note(used)
        for (rank, feature), leaf in leaves.items():
            if leaf.requires_grad:
                found.gradients[step, rank, feature] = _gradient(noise, noted, leaf, rank, feature)
        for table in tables:
            table.step()
    found.weights = {table.config.name: table.module.weight.detach().clone() for table in tables}
    return found


def _gradient(noise: Noise, noted: list[Used], leaf: Tensor, rank: int, feature: str) -> Tensor:
    """The gradient of a rank's per-sample weights, with the error of its dot products."""
    bound = torch.zeros_like(leaf)
    for used in noted:
        if used.feature == feature:
            rows, grad, table = used.table.module.weight.detach().abs()[used.ids], used.of_ids(), used.table
            error = (rows.shape[1] + 3) * table.unit * grad + table.coded(table.case.codecs[1], grad)
            bound += (rows * error).sum(1).split(used.sizes)[rank]
    return noise(torch.zeros_like(leaf) if leaf.grad is None else leaf.grad, bound)
