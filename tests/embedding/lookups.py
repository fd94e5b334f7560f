"""Random lookups and the plain-torch truth that kernels are compared with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

from recshard_lab.embedding import DataType, EmbOptimType, OptimizerSpec, RowWiseAdagrad, WeightDecayMode
from recshard_lab.embedding.kernels import KernelInput, KernelSpec, LookupKernel, ShardSpec, available, kernel_named
from recshard_lab.embedding.optimizers import LAMB, LarsSGD, PartialRowWiseAdam, PartialRowWiseLAMB

KERNELS = [kernel_named(name) for name in available()]
SPECS = [OptimizerSpec(optimizer, learning_rate=0.3, eps=1e-3) for optimizer in EmbOptimType]
SPECS = [replace(spec, eta=0.3) if spec.optimizer is EmbOptimType.LARS_SGD else spec for spec in SPECS]


def can(kernel: type[LookupKernel], spec: OptimizerSpec) -> bool:
    """Whether a kernel has an optimizer at all, on a table that asks for nothing special."""
    return kernel.refuses(KernelSpec([ShardSpec("t", 4, 4, DataType.FP32, 4)], [0], spec)) is None


PAIRS = [(kernel, spec) for kernel in KERNELS for spec in SPECS if can(kernel, spec)]


@dataclass(frozen=True)
class Shape:
    """Shards ``(rows, columns)``, which shard each feature reads, the lengths of its bags ``[L][B]``."""

    shards: tuple[tuple[int, int], ...]
    features: tuple[int, ...]
    lengths: tuple[tuple[int, ...], ...]
    seed: int

    def make_shards(self, data_type: DataType = DataType.FP32) -> list[ShardSpec]:
        return [ShardSpec(f"table{i}", rows, cols, data_type, cols) for i, (rows, cols) in enumerate(self.shards)]

    def ids(self, dtype: torch.dtype = torch.int64) -> Tensor:
        """Ids that crowd at both ends of each shard."""
        torch.manual_seed(self.seed)
        parts = []
        for shard, lengths in zip(self.features, self.lengths, strict=True):
            rows, size = self.shards[shard][0], (sum(lengths),)
            ends = torch.randint(0, 2, size) * (rows - 1)
            parts.append(torch.where(torch.rand(size) < 0.4, ends, torch.randint(0, rows, size)))
        return torch.cat(parts).to(dtype)

    def offsets(self, pooled: bool) -> Tensor:
        lengths = torch.tensor(self.lengths).reshape(len(self.features), -1)
        flat = lengths.reshape(-1) if pooled else lengths.sum(1)
        return functional.pad(flat.cumsum(0), (1, 0)).long()


@st.composite
def shapes(draw: Any, dims: Sequence[int] = (4, 8, 64), max_batch: int = 4) -> Shape:
    shards = draw(st.lists(st.tuples(st.integers(1, 6), st.sampled_from(dims)), min_size=1, max_size=4))
    extra = draw(st.lists(st.integers(0, len(shards) - 1), max_size=3))
    features = draw(st.permutations([*range(len(shards)), *extra]))
    batch = draw(st.integers(0, max_batch))
    lengths = st.one_of(
        st.just((0,) * batch), st.tuples(*[st.sampled_from([0, 0, 1, 2, 5])] * batch)
    )  # empty features, empty bags
    return Shape(tuple(shards), tuple(features), tuple(draw(lengths) for _ in features), draw(st.integers(0, 999)))


SHAPE = Shape(((7, 4), (5, 8), (6, 4)), (1, 0, 2, 1), ((2, 0, 3), (1, 1, 0), (0, 0, 0), (4, 0, 1)), seed=0)


class Truth:
    """Autograd through one `embedding_bag` or `embedding` a feature, then an ordinary torch optimizer."""

    def __init__(self, shape: Shape, spec: OptimizerSpec | None, pooled: bool, dtype: torch.dtype = torch.float32):
        torch.manual_seed(shape.seed)
        self.shape, self.pooled = shape, pooled
        self.tables = [nn.Parameter(torch.randn(rows, cols, dtype=dtype)) for rows, cols in shape.shards]
        self.optimizer = None if spec is None else dense_twin(spec, self.tables)

    def fill(self, kernel: LookupKernel) -> None:
        for own, table in zip(kernel.weights(), self.tables, strict=True):
            own.copy_(table.detach())

    def forward(self, ids: Tensor, weights: Tensor | None) -> Tensor:
        outputs = []
        starts = [0, *torch.tensor([sum(lengths) for lengths in self.shape.lengths]).cumsum(0).tolist()]
        for (shard, lengths), (begin, end) in zip(
            zip(self.shape.features, self.shape.lengths, strict=True), pairwise(starts), strict=True
        ):
            table, own = self.tables[shard], ids[begin:end].long()
            rows = functional.embedding(own, table)
            if not self.pooled:
                outputs.append(rows.reshape(-1))
                continue
            if weights is not None:
                rows = rows * weights[begin:end].unsqueeze(1)
            bags = [bag.sum(0) for bag in rows.split(list(lengths))]
            outputs.append(torch.stack(bags) if bags else table[:0])
        return torch.cat(outputs, dim=1 if self.pooled else 0)

    def step(self) -> None:
        assert self.optimizer is not None
        self.optimizer.step()
        self.optimizer.zero_grad()


class OnTouchedRows(torch.optim.Optimizer):
    """A torch optimizer whose step is undone on rows without gradient: weights, momenta and all."""

    def __init__(self, inner: torch.optim.Optimizer, clip: float | None = None) -> None:
        self.inner, self.clip = inner, clip
        super().__init__([p for group in inner.param_groups for p in group["params"]], {})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        held = []
        for table in self.param_groups[0]["params"]:
            if table.grad is not None:
                if self.clip is not None:
                    table.grad.clamp_(-self.clip, self.clip)
                own = {name: s for name, s in self.inner.state[table].items() if s.dim()}
                before = {name: s.clone() for name, s in own.items()}
                held.append((table, table.clone(), before, (table.grad == 0).all(1)))
        self.inner.step()
        for table, weights, before, untouched in held:
            table[untouched] = weights[untouched]
            for name, state in self.inner.state[table].items():
                if state.dim():
                    old = before.get(name, torch.zeros_like(state))  # made in this very step
                    state[untouched] = old[untouched]


def dense_twin(spec: OptimizerSpec, tables: list[nn.Parameter]) -> torch.optim.Optimizer:
    """torch's own optimizer where it has one, else this library's dense class (held to its formula by a test)."""
    common = {"lr": spec.learning_rate, "weight_decay": spec.weight_decay}
    betas = {"eps": spec.eps, "betas": (spec.beta1, spec.beta2)}
    adam = torch.optim.AdamW if spec.weight_decay_mode is WeightDecayMode.DECOUPLE else torch.optim.Adam
    made: torch.optim.Optimizer = {
        EmbOptimType.EXACT_SGD: lambda: torch.optim.SGD(tables, **common),
        EmbOptimType.EXACT_ADAGRAD: lambda: torch.optim.Adagrad(tables, **common, eps=spec.eps),
        EmbOptimType.EXACT_ROWWISE_ADAGRAD: lambda: RowWiseAdagrad(tables, **common, eps=spec.eps),
        EmbOptimType.ADAM: lambda: adam(tables, **common, **betas),
        EmbOptimType.PARTIAL_ROWWISE_ADAM: lambda: PartialRowWiseAdam(tables, **common, **betas),
        EmbOptimType.LAMB: lambda: LAMB(tables, **common, **betas),
        EmbOptimType.PARTIAL_ROWWISE_LAMB: lambda: PartialRowWiseLAMB(tables, **common, **betas),
        EmbOptimType.LARS_SGD: lambda: LarsSGD(tables, **common, momentum=spec.momentum, eta=spec.eta),
    }[spec.optimizer]()
    return OnTouchedRows(made, spec.max_gradient if spec.gradient_clipping else None)


def make(
    kernel: type[LookupKernel], shape: Shape, spec: OptimizerSpec | None, pooled: bool, **overrides: Any
) -> LookupKernel:
    return kernel(KernelSpec(shape.make_shards(**overrides), shape.features, spec, pooled))


def look_up(kernel: LookupKernel, ids: Tensor, offsets: Tensor, weights: Tensor | None = None) -> tuple[Tensor, Any]:
    """A training lookup, with the counts that the offsets have."""
    bags = (len(offsets) - 1) // len(kernel.features) if kernel.pooled else 1
    counts = offsets[:: max(1, bags)].diff().tolist() if bags else [0] * len(kernel.features)
    return kernel.forward(KernelInput(ids, offsets, weights, counts), True)
