"""What happens in a `Life`: on the ranks, and in plain torch on one of them.

The truth knows nothing of this library's lookups: rows are indexed and added by plain torch in float64, gradients are
autograd's, optimizers are dense ones (`dense_twin`). Beside each number stands how far the ranks' may lie from it:

    FP64   1e-12 of the table's largest weight          sums are added in another order
    FP32   1e-5 of it                                   the same, and settings like eps amplify
    FP16, BF16   4 ulp of the row's largest a step      weights are rounded after each step, once this way, once that
    codec  its own bound on the largest partial sum     once a piece and a hop; of gradients, once an occurrence
"""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from recshard_lab import (
    DataType,
    DistributedModelParallel,
    EmbeddingBagCollection,
    EmbeddingCollection,
    KeyedJaggedTensor,
    PoolingType,
    ShardingPlan,
)
from recshard_lab.comm import QCommsConfig, get_qcomm_codecs_registry, make_codec
from recshard_lab.distributed import EmbeddingBagCollectionSharder, EmbeddingCollectionSharder
from recshard_lab.distributed.sharded_collections import ShardedCollection
from recshard_lab.distributed.step.layout import CollectionOptions
from recshard_lab.embedding import OptimizerSpec, WeightDecayMode, embedding_names_by_table
from recshard_lab.embedding.kernels import TORCH_DTYPES
from recshard_lab.embedding.optimizers.rules import RULES
from tests.distributed.anything import Life
from tests.distributed.jobs import Bags, Inverse, batch_of, expand
from tests.distributed.state_jobs import everything, same
from tests.embedding.lookups import dense_twin

RELATIVE = {DataType.FP64: 1e-12, DataType.FP32: 1e-5, DataType.FP16: 1e-5, DataType.BF16: 1e-5}
ULP = {DataType.FP64: 2.0**-52, DataType.FP32: 2.0**-23, DataType.FP16: 2.0**-10, DataType.BF16: 2.0**-7}
DENSE = {"lr": 0.05, "momentum": 0.9}  # of the torch optimizer over tables on the dense kernel


def start_weights(life: Life) -> list[Tensor]:
    """Away from zero, so that trust ratios are ordinary numbers; rounded as the tables are."""
    generator = torch.Generator().manual_seed(life.seed)
    made = []
    for table in life.tables:
        drawn = torch.rand(table["num_embeddings"], table["embedding_dim"], generator=generator, dtype=torch.float64)
        made.append((drawn - 0.5).to(TORCH_DTYPES[table["data_type"]]))
    return made


def samples_of(bags: Bags, inverse: Inverse | None) -> int:
    return len(next(iter((bags if inverse is None else inverse).values())))


def mixing(life: Life, step: int, rows: int, columns: int, salt: int = 0) -> Tensor:
    """``[rows, columns]`` of sizes from 0.5 to 1: the linear part of the loss's gradient."""
    generator = torch.Generator().manual_seed(life.seed + 7 * step + 1000 * salt)
    drawn = torch.rand(rows, columns, generator=generator, dtype=torch.float64) - 0.5
    return (drawn + drawn.sign() * 0.5).float().double()


# ---- on the ranks ----


class _Sharder(EmbeddingBagCollectionSharder):
    """Gives every table an optimizer of its own."""

    specs: dict[str, OptimizerSpec]

    def build(self, module: nn.Module, params: Any, env: Any, device: torch.device) -> ShardedCollection:
        options = CollectionOptions(
            weighted=bool(getattr(module, "is_weighted", lambda: False)()),
            backend=self.backend,
            codecs=self.qcomm_codecs_registry,
            out_of_range=str(module.out_of_range),
        )
        return self.sharded_type(self.tables(module), params, self.specs, env, device, options)


class _SequenceSharder(_Sharder):
    module_type = EmbeddingCollection
    sharded_type = EmbeddingCollectionSharder.sharded_type
    tables = EmbeddingCollectionSharder.tables


@dataclass
class Told:
    """What one rank saw."""

    outputs: list[list[Tensor]] = field(default_factory=list)  # step -> output -> its rows of the local batch
    weights: dict[str, Tensor] = field(default_factory=dict)
    changed: list[str] = field(default_factory=list)  # by the move
    strays: int = 0


def sharded(life: Life) -> DistributedModelParallel:
    """The model under its first plan."""
    make: Any = EmbeddingCollection if life.sequence else EmbeddingBagCollection
    options = {} if life.sequence else {"is_weighted": life.weighted}
    collection = make(life.configs(), out_of_range=life.policy, **options)
    if torch.distributed.get_rank() == 0:  # whose weights must win
        with torch.no_grad():
            for parameter, weight in zip(collection.parameters(), start_weights(life), strict=True):
                parameter.copy_(weight)
    registry = get_qcomm_codecs_registry(QCommsConfig(*life.codecs)) if life.coded() else None
    sharder = (_SequenceSharder if life.sequence else _Sharder)(None, registry, backend=life.backend)
    sharder.specs = {
        table["name"]: OptimizerSpec.from_fused_params(given)
        for table, given in zip(life.tables, life.fused, strict=True)
    }
    return DistributedModelParallel(collection, plan=ShardingPlan.from_json(life.plans[0]), sharders=[sharder])


def live(life: Life) -> Told:
    """Runs on every rank."""
    warnings.filterwarnings("ignore", "Please use DTensor")  # what torch says of its own sharded tensors
    dmp, told = sharded(life), Told()
    parameters = dmp.dense_parameters()
    optimizers = [torch.optim.SGD(parameters, **DENSE)] if any(life.dense()) and parameters else []
    if any(life.dense()) and not parameters:  # this rank holds nothing of them, yet
        optimizers = [torch.optim.SGD([nn.Parameter(torch.zeros(1))], **DENSE)]
    for step in range(len(life.steps)):
        if step == life.first:
            before = everything(dmp)
            plan = ShardingPlan.from_json(life.plans[1])
            dmp.reshard(plan, max_extra_bytes=life.bound, optimizers=optimizers or None)
            told.changed = same(before, everything(dmp))
        told.outputs.append(_train(life, step, dmp, optimizers))
    told.weights = {name.split(".")[-2]: value.clone() for name, value in dmp.full_state_dict().items()}
    (collection,) = dmp.collections.values()
    told.strays = collection.out_of_range_count()
    return told


def _train(life: Life, step: int, dmp: DistributedModelParallel, optimizers: Sequence[Any]) -> list[Tensor]:
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    ranks, inverses = life.steps[step], life.inverse[step]
    out = dmp(_batch(life, ranks[rank], inverses[rank]))
    for optimizer in optimizers:
        optimizer.zero_grad()
    if life.sequence:
        outputs = [out[name].values() for name in out]
        counts = [[sum(map(len, bags[name.partition("@")[0]])) for bags in ranks] for name in out]
    else:
        outputs = list(out.to_dict().values())
        counts = [[samples_of(bags, own) for bags, own in zip(ranks, inverses, strict=True)] for _ in outputs]
    loss = torch.zeros((), dtype=torch.float64)
    for number, (rows, count) in enumerate(zip(outputs, counts, strict=True)):
        mix = mixing(life, step, sum(count), rows.shape[1], number)[sum(count[:rank]) : sum(count[: rank + 1])]
        loss = loss + (rows * (mix + life.curve * rows.detach()).to(rows.dtype)).sum()
    (loss * world).backward()  # gradients are averaged over ranks
    for optimizer in optimizers:
        optimizer.step()
    return [rows.detach().clone() for rows in outputs]


def _batch(life: Life, bags: Bags, inverse: Inverse | None) -> KeyedJaggedTensor:
    made = batch_of(bags, life.weighted, inverse)
    return KeyedJaggedTensor(
        made.keys(),
        made.values().to(life.ids_dtype),
        made.weights_or_none(),
        lengths=made.lengths(),
        stride=None if inverse is not None else made.stride(),
        stride_per_key_per_rank=made.stride_per_key_per_rank() if inverse is not None else None,
        inverse_indices=made.inverse_indices_or_none(),
    )


# ---- the truth ----


@dataclass
class Truth:
    """What must come out, and beside each tensor how far off it may be."""

    outputs: list[list[tuple[Tensor, Tensor]]] = field(default_factory=list)  # step -> output -> of the global batch
    weights: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)
    strays: int = 0


class _Table:
    """One table in float64 under its dense optimizer; ``drift`` ``[E, 1]`` is what rounding allows so far."""

    def __init__(self, life: Life, number: int, start: Tensor) -> None:
        self.life, self.config = life, life.configs()[number]
        self.weight = nn.Parameter(start.double())
        self.drift = torch.zeros(start.shape[0], 1, dtype=torch.float64)
        self.spec = OptimizerSpec.from_fused_params(life.fused[number])
        self.stepped_outside = life.dense()[number]
        inside = RULES[self.spec.optimizer].decays_inside
        plain = replace(
            self.spec,
            weight_decay=self.spec.weight_decay if inside else 0.0,
            weight_decay_mode=self.spec.weight_decay_mode if inside else None,
            gradient_clipping=False,
            max_gradient=1.0,
            max_norm=0.0,
        )
        self.optimizer = (
            torch.optim.SGD([self.weight], **DENSE) if self.stepped_outside else dense_twin(plain, [self.weight]).inner  # type: ignore[attr-defined]
        )
        sharding = [ShardingPlan.from_json(plan).tables()[self.config.name] for plan in life.plans]
        self.pieces = max(1 if own.replicated else len(own.shards) for own in sharding)
        self.forward_codec, self.backward_codec = (make_codec(kind) for kind in life.codecs)

    def lookup(self, ids: Tensor, weights: Tensor, bag: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """The output of one feature, and its tolerance."""
        kept = (ids >= 0) & (ids < self.config.num_embeddings)
        if self.life.policy == "clamp":
            ids, kept = ids.clamp(0, self.config.num_embeddings - 1), torch.ones_like(kept)
        rows = torch.where(kept, ids, torch.zeros_like(ids))
        factor = (weights * kept).unsqueeze(1)
        size, drift = self.weight.detach().abs(), self.drift.expand_as(self.weight)
        if self.life.sequence:
            out, largest, slack = (table[rows] * factor for table in (self.weight, size, drift))
        else:
            zeros = torch.zeros(lengths.numel(), self.weight.shape[1], dtype=torch.float64)
            out, largest, slack = (
                zeros.index_add(0, bag, table[rows] * factor) for table in (self.weight, size, drift)
            )
            if self.config.pooling is PoolingType.MEAN:
                out, slack = (value / lengths.clamp(min=1).unsqueeze(1) for value in (out, slack))
        most = float(largest.max()) if largest.numel() else 0.0
        off = slack + RELATIVE[self.config.data_type] * most + _unit(self.forward_codec, most) * 2 * (self.pieces + 1)
        return out, off

    def step(self, rows: Tensor, weights: Tensor, named: set[int]) -> None:
        """One step of the rows that the global batch named; each use of one brings its gradient's coding error."""
        assert self.weight.grad is not None
        touched = torch.tensor([row in named for row in range(self.weight.shape[0])])
        before = self.weight.detach().abs().amax(1, keepdim=True)  # a step to near zero is rounded as large numbers are
        coded = torch.zeros_like(self.drift).index_add(0, rows, weights.abs().unsqueeze(1))
        self.drift += self.optimizer.param_groups[0]["lr"] * coded * 2 * _unit(self.backward_codec, 1.0)
        if self.stepped_outside:
            self.drift *= 1.9  # of the momentum's own rounding, once more
            self.drift += 9.0 * self.optimizer.param_groups[0]["lr"] * coded * 2 * _unit(self.backward_codec, 1.0)
            self.optimizer.step()
        else:
            self._step_touched(touched)
        with torch.no_grad():
            kind = TORCH_DTYPES[self.config.data_type]
            size = torch.maximum(before, self.weight.abs().amax(1, keepdim=True))
            self.drift += touched.unsqueeze(1) * 4 * ULP[self.config.data_type] * size
            self.weight.copy_(self.weight.to(kind).double())
        self.weight.grad = None

    @torch.no_grad()
    def _step_touched(self, touched: Tensor) -> None:
        spec, weight, grad = self.spec, self.weight, self.weight.grad
        assert grad is not None
        before = weight.clone()
        state = self.optimizer.state[weight]
        kept = {name: value.clone() for name, value in state.items() if value.dim()}
        if spec.gradient_clipping:
            grad.clamp_(-spec.max_gradient, spec.max_gradient)
        apart = not RULES[spec.optimizer].decays_inside
        if apart and spec.weight_decay_mode is WeightDecayMode.L2:
            grad.add_(weight, alpha=spec.weight_decay)
        # dense twins leave rows without gradient alone; ours move them by their state or decay where an id names them
        state_rows = [value.reshape(len(grad), -1) for value in kept.values()]
        moves = (torch.cat([torch.zeros_like(grad), *state_rows], 1) != 0).any(1) | (spec.weight_decay > 0)
        grad[touched & moves & (grad == 0).all(1)] = 1e-300
        self.optimizer.step()
        if apart and spec.weight_decay_mode is WeightDecayMode.DECOUPLE:
            weight.add_(before, alpha=-spec.learning_rate * spec.weight_decay)
        if spec.max_norm:
            weight.mul_((spec.max_norm / weight.norm(dim=1, keepdim=True)).clamp(max=1.0))
        weight[~touched] = before[~touched]
        for name, value in self.optimizer.state[weight].items():
            if value.dim():
                value[~touched] = kept.get(name, torch.zeros_like(value))[~touched]


def _unit(codec: Any, size: float) -> float:
    """The codec's own bound for numbers up to a size."""
    return float(codec.error_bound(torch.tensor([[-size, size]], dtype=torch.float32)).max())


def truth_of(life: Life) -> Truth:
    """The whole life on one process, never moved."""
    truth = Truth()
    tables = [_Table(life, number, start) for number, start in enumerate(start_weights(life))]
    keys = [
        (table, feature)
        for table, names in zip(tables, embedding_names_by_table(life.configs()), strict=True)
        for feature, _ in zip(table.config.feature_names, names, strict=True)
    ]
    for step, (ranks, inverses) in enumerate(zip(life.steps, life.inverse, strict=True)):
        lookups = [_flat(life, ranks, inverses, feature) for _, feature in keys]
        truth.strays += _strays(keys, ranks)
        found = [table.lookup(*lookup) for (table, _), lookup in zip(keys, lookups, strict=True)]
        loss = torch.zeros((), dtype=torch.float64)
        for number, (out, _) in enumerate(found):
            mix = mixing(life, step, out.shape[0], out.shape[1], number)
            loss = loss + (out * (mix + life.curve * out.detach())).sum()
        loss.backward()
        truth.outputs.append([(out.detach(), off.detach()) for out, off in found])
        for table in tables:
            own = [lookup for (other, _), lookup in zip(keys, lookups, strict=True) if other is table]
            ids, weights = (torch.cat([lookup[n] for lookup in own]) for n in (0, 1))
            rows = table.config.num_embeddings
            if life.policy == "clamp":
                ids = ids.clamp(0, rows - 1)
            kept = (ids >= 0) & (ids < rows)
            table.step(ids[kept], weights[kept], _named(life, table, ranks))
    for table in tables:
        size = float(table.weight.detach().abs().max())
        off = (table.drift + RELATIVE[table.config.data_type] * size).expand_as(table.weight)
        truth.weights[table.config.name] = (table.weight.detach(), off.detach())
    return truth


def _flat(
    life: Life, ranks: Sequence[Bags], inverses: Sequence[Inverse | None], feature: str
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """One feature of the global batch: ids, their weights, their samples ``[N]``, and lengths ``[B]``."""
    bags = []
    for own, inverse in zip(ranks, inverses, strict=True):
        whole: Mapping[str, list[list[int]]] = own if life.sequence else expand(own, inverse)
        bags += whole[feature]
    lengths = torch.tensor([len(bag) for bag in bags], dtype=torch.int64)
    batch = batch_of({feature: bags}, life.weighted)
    weights = batch.weights_or_none()
    ids = batch.values()
    each = torch.ones(ids.numel(), dtype=torch.float64) if weights is None else weights.double()
    return ids, each, torch.repeat_interleave(torch.arange(lengths.numel()), lengths), lengths


def _named(life: Life, table: _Table, ranks: Sequence[Bags]) -> set[int]:
    """Rows that some bag names, be it one that no sample of a variable batch has."""
    last = table.config.num_embeddings - 1
    ids = [i for feature in table.config.feature_names for bags in ranks for bag in bags[feature] for i in bag]
    return {max(0, min(i, last)) if life.policy == "clamp" else i for i in ids}


def _strays(keys: Sequence[tuple[_Table, str]], ranks: Sequence[Bags]) -> int:
    """Ids that are no rows, in the batches as they were sent."""
    return sum(
        not 0 <= i < table.config.num_embeddings
        for table, feature in keys
        for bags in ranks
        for bag in bags[feature]
        for i in bag
    )
