"""Batches whose tensors are views of every kind, and every public entry that takes them.

A view holds the same numbers as a contiguous tensor, elsewhere in memory. The elements between them are valid, wrong
numbers, so that code which ignores strides reads other rows instead of failing.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from recshard_lab import (
    DistributedModelParallel,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    FusedEmbeddingBagCollection,
    JaggedTensor,
    KeyedJaggedTensor,
    ParameterSharding,
    Shard,
    ShardingPlan,
    Topology,
)
from recshard_lab.distributed import EmbeddingBagCollectionSharder, EmbeddingCollectionSharder
from recshard_lab.embedding import (
    DataType,
    FusedEmbeddingCollection,
    QuantEmbeddingBagCollection,
)
from recshard_lab.embedding.kernels import kernel_named
from recshard_lab.sharding.schemes import scheme_named, scheme_names

ROWS, DIM, BATCH = 12, 8, 4
KEYS = ["a", "b"]
DTYPES = (torch.int64, torch.int32)
TENSORS = ("values", "lengths", "offsets", "weights")


def column(tensor: Tensor) -> Tensor:
    """A column of a matrix: stride 2, with other numbers between."""
    return torch.stack([tensor, tensor.roll(1).flip(0)], 1)[:, 0]


def flipped(tensor: Tensor) -> Tensor:
    """The reverse of a reversed copy."""
    return tensor.flip(0).flip(0)


def inside(tensor: Tensor) -> Tensor:
    """A slice of a longer tensor, with a storage offset."""
    return torch.cat([tensor.flip(0), tensor, tensor.flip(0)])[tensor.numel() : 2 * tensor.numel()]


def expanded(tensor: Tensor) -> Tensor:
    """One stored element, stride 0. The tensor must be constant."""
    return tensor[:1].expand(tensor.numel())


VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "column": column,
    "flipped": flipped,
    "inside": inside,
    "expanded": expanded,
}


@dataclass(frozen=True)
class Parts:
    """The tensors of a batch of `KEYS`, int64 and contiguous until they are replaced by views."""

    values: Tensor
    lengths: Tensor | None
    offsets: Tensor | None
    weights: Tensor | None

    def keyed(self, weighted: bool = True) -> KeyedJaggedTensor:
        weights = self.weights if weighted else None
        return KeyedJaggedTensor(KEYS, self.values, weights, self.lengths, self.offsets)


def batches(view: str, name: str, seed: int) -> list[Parts]:
    """Ordinary numbers; no ids at all; for expanded views, numbers that are all the same."""
    torch.manual_seed(seed)
    bags = torch.tensor([2, 0, 1, 3, 1, 4, 0, 2]).roll(seed)
    ordinary = Parts(torch.randint(0, ROWS, (13,)), bags, None, torch.randint(1, 16, (13,)) / 16)
    none = Parts(torch.empty(0, dtype=torch.int64), torch.zeros(8, dtype=torch.int64), None, torch.empty(0))
    same = Parts(torch.full((16,), 5 + seed), torch.full((8,), 2), None, torch.full((16,), 0.5))
    found = [same] if view == "expanded" else [ordinary, none]
    if name == "offsets":
        found = [none] if view == "expanded" else found
        found = [
            replace(own, lengths=None, offsets=nn.functional.pad(own.lengths.cumsum(0), (1, 0)))  # type: ignore[union-attr]
            for own in found
        ]
    return found


def pairs(seed: int = 0) -> Iterator[tuple[str, Parts, Parts]]:
    """(what is looked at, the contiguous int64 batch, the same numbers as views)."""
    for view, make in VIEWS.items():
        for name in TENSORS:
            for number, truth in enumerate(batches(view, name, seed)):
                for dtype in DTYPES if name != "weights" else (torch.float32,):
                    tensor = getattr(truth, name)
                    seen = make(tensor.to(dtype)) if tensor.numel() else tensor.to(dtype).expand(0)
                    yield f"{view} {name} {dtype} batch {number}", truth, replace(truth, **{name: seen})
    for truth in batches("column", "values", seed):  # all of them, in int32
        seen = Parts(column(truth.values.int()), column(truth.lengths.int()), None, column(truth.weights))  # type: ignore[union-attr, arg-type]
        yield "all tensors", truth, seen


def plain(found: Any) -> list[Any]:
    """Numbers of whatever an entry returns, integers as int64."""
    if isinstance(found, JaggedTensor | KeyedJaggedTensor):
        weights = found.weights_or_none()
        return plain([found.values(), found.lengths(), found.offsets(), *([] if weights is None else [weights])])
    if isinstance(found, Tensor):
        return [(found if found.is_floating_point() else found.long()).tolist()]
    if isinstance(found, dict):
        return [part for key in found for part in [key, *plain(found[key])]]
    if isinstance(found, list | tuple):
        return [part for own in found for part in plain(own)]
    return [found]


# ---- what takes a batch: each returns numbers ----


def jagged(parts: Parts) -> Any:
    made = JaggedTensor(parts.values, parts.weights, parts.lengths, parts.offsets)
    copy = JaggedTensor.empty_like(made, "cpu")
    return [
        made,
        made.to_dense(),
        made.to_dense_weights(),
        made.to_padded_dense(3),
        made.to_padded_dense_weights(),
        made.to("cpu"),
        copy.copy_(made),
        pytree.tree_map(lambda tensor: tensor, made),
        JaggedTensor.from_dense(made.to_dense(), made.to_dense_weights()),
    ]


def keyed(parts: Parts) -> Any:
    made = parts.keyed()
    other = made.permute([1, 0])
    return [
        made,
        other,
        made.permute([1, 1, 0]),
        made.split([1, 1]),
        KeyedJaggedTensor.concat([made, other]),
        KeyedJaggedTensor.from_jt_dict(made.to_dict()),
        [made[key].to_padded_dense(4) for key in KEYS],
        made.flatten_lengths(),
        made.to("cpu"),
        KeyedJaggedTensor.empty_like(made, torch.device("cpu")).copy_(made),
        pytree.tree_map(lambda tensor: tensor, made),
        made.length_per_key(),
        made.offset_per_key(),
    ]


def _tables(kind: Any) -> list[Any]:
    def fill(weight: Tensor) -> None:
        with torch.no_grad():
            weight.copy_(torch.arange(float(weight.numel())).view_as(weight) / 16)

    return [kind(ROWS, DIM, f"t{key}", DataType.FP32, [key], init_fn=fill) for key in KEYS]


def _step(module: nn.Module, batch: KeyedJaggedTensor) -> list[Tensor]:
    """Rows, and what one SGD step makes of the tables."""
    out = module(batch)
    rows = torch.cat([own.values().reshape(-1) for own in out.values()]) if isinstance(out, dict) else out.values()
    if rows.requires_grad:
        rows.mul(torch.arange(float(rows.numel())).view_as(rows) / 64).sum().backward()
    for parameter in module.parameters():
        if parameter.grad is not None:
            parameter.data -= 0.5 * parameter.grad
    return [rows.detach(), *(own.detach().clone() for own in module.state_dict().values())]


def unsharded(parts: Parts) -> Any:
    found: list[Any] = []
    sgd = (torch.optim.SGD, {"lr": 0.5})
    for weighted in (False, True):
        batch = parts.keyed(weighted)
        bags = EmbeddingBagCollection(_tables(EmbeddingBagConfig), is_weighted=weighted)
        found += [_step(bags, batch)]
        small = [QuantEmbeddingBagCollection.from_float(bags, dtype=kind) for kind in (DataType.INT8, DataType.INT4)]
        found += [own(batch).values() for own in small]
        for backend in BACKENDS:
            found += [
                _step(FusedEmbeddingBagCollection(_tables(EmbeddingBagConfig), *sgd, weighted, backend=backend), batch)
            ]
    batch = parts.keyed(False)
    found += [_step(EmbeddingCollection(_tables(EmbeddingConfig), need_indices=True), batch)]
    for backend in BACKENDS:
        found += [_step(FusedEmbeddingCollection(_tables(EmbeddingConfig), *sgd, backend=backend), batch)]
    return found


BACKENDS = [name for name in ("native", "fbgemm", "numba") if kernel_named(name).unavailable() is None]


ENTRIES: dict[str, Callable[[Parts], Any]] = {own.__name__: own for own in (jagged, keyed, unsharded)}


# ---- on ranks ----


SCHEMES = [*scheme_names(), "custom"]
KINDS = ["pooled", "weighted", "sequence"]


def plan_of(world: int, tables: list[Any], scheme: str) -> ShardingPlan:
    """Every table under one scheme: ids of several are one run of the batch's memory, which is not copied."""
    entries = {}
    for table in tables:
        if scheme == "custom":  # row ranges that differ between columns
            left, right = (0, DIM // 2), (DIM // 2, DIM)
            rects = [((0, 5), left), ((5, ROWS), left), ((0, 7), right), ((7, ROWS), right)]
            shards = [Shard(n % world, *rect) for n, rect in enumerate(rects)]
        else:
            shards = list(scheme_named(scheme).default(table, Topology(world), None).shards)
        entries[table.name] = ParameterSharding(scheme, shards=shards)
    return ShardingPlan({"": entries})  # type: ignore[dict-item]


class Sharded:
    """A model under one scheme that starts each step from the same weights."""

    def __init__(self, kind: str, scheme: str, backend: str | None) -> None:
        torch.manual_seed(0)
        self.weighted, sequence = kind == "weighted", kind == "sequence"
        config: Any = EmbeddingConfig if sequence else EmbeddingBagConfig
        tables = [config(ROWS, DIM, f"t{key}", DataType.FP32, [key]) for key in KEYS]
        collection = EmbeddingCollection(tables) if sequence else EmbeddingBagCollection(tables, self.weighted)
        fused = {"optimizer": "exact_sgd", "learning_rate": 0.5}
        sharder = (EmbeddingCollectionSharder if sequence else EmbeddingBagCollectionSharder)(fused, backend=backend)
        plan = plan_of(torch.distributed.get_world_size(), tables, scheme)
        self.model = DistributedModelParallel(collection, plan=plan, sharders=[sharder])
        (shards,) = self.model.collections.values()
        self.held = [weight for own in shards.table_shards().values() for weight in own.local_weights.values()]
        self.start = [weight.clone() for weight in self.held]

    def step(self, parts: Parts) -> list[Tensor]:
        """Rows, trained weights, gradients of per-sample weights."""
        for weight, own in zip(self.held, self.start, strict=True):
            weight.copy_(own)
        weights = parts.weights.detach().requires_grad_() if self.weighted and parts.weights is not None else None
        out = self.model(replace(parts, weights=weights).keyed())
        values = [own.values().reshape(-1) for own in out.values()] if isinstance(out, dict) else [out.values()]
        rows = torch.cat(values)
        rows.mul(torch.arange(float(rows.numel())).view_as(rows) / 64).sum().backward()
        grads = [] if weights is None or weights.grad is None else [weights.grad]
        return [rows.detach(), *(weight.clone() for weight in self.held), *grads]


def wrong_on_rank(kind: str, scheme: str) -> tuple[int, list[str]]:
    """How many views were tried, and which gave other numbers than contiguous int64. Runs on every rank.

    Kernels take turns: each serves every kind, under a third of the schemes.
    """
    backend = BACKENDS[(KINDS.index(kind) + SCHEMES.index(scheme)) % len(BACKENDS)]
    sharded, tried, wrong = Sharded(kind, scheme, backend), 0, []
    truths: dict[str, list[Tensor]] = {}
    for name, truth, seen in pairs(seed=torch.distributed.get_rank()):
        key = str((truth.values.tolist(), truth.lengths is None))
        truths[key] = truths.get(key) or sharded.step(truth)
        tried += 1
        if not all(map(torch.equal, sharded.step(seen), truths[key])):
            wrong.append(name)
    return tried, wrong
