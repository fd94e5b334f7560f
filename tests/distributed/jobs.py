"""What ranks run in the tests: everything goes in and comes out as plain data.

The truth is computed in one process, by plain torch (``torch.nn.functional.embedding_bag`` on dense parameters with
autograd and a dense optimizer), on the concatenation of all ranks' batches.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from recshard_lab import (
    DistributedModelParallel,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    KeyedJaggedTensor,
    ShardingPlan,
)
from recshard_lab.comm import trace
from recshard_lab.distributed import (
    DefaultDataParallelWrapper,
    EmbeddingBagCollectionSharder,
    EmbeddingCollectionSharder,
)
from recshard_lab.models import PositionWeightedModuleCollection
from recshard_lab.optim import RowWiseAdagrad

Bags = dict[str, list[list[int]]]  # feature -> sample -> ids
Inverse = dict[str, list[int]]  # feature -> sample -> which of the feature's bags is its own


@dataclass
class Case:
    """A model, its plan and its batches."""

    tables: list[dict[str, Any]]  # keyword arguments of the config
    plan: str  # JSON
    steps: list[list[Bags]]  # step -> rank -> its batch
    optimizer: str = "exact_sgd"
    learning_rate: float = 0.05
    eps: float = 1e-8
    backend: str | None = None
    sequence: bool = False
    dedup: bool = False  # each distinct id is sent once; of sequences
    weighted: bool = False
    learned: tuple[str, ...] = ()  # features whose ids have learned weights, by place in the bag
    seed: int = 0
    device: str = "cpu"
    codecs: Any = None  # a qcomm_codecs_registry
    out_of_range: str = "error"
    find_unused: bool | None = None  # whether DDP searches each step for unused parameters; None is the default
    inverse: list[list[Inverse]] | None = None  # step -> rank -> how its bags make samples (variable batches)

    def inverses(self, step: int) -> list[Inverse | None]:
        """Of each rank."""
        return [None] * len(self.steps[step]) if self.inverse is None else list(self.inverse[step])


@dataclass
class Result:
    """What the training of a case gave, on one rank or unsharded."""

    outputs: list[Tensor] = field(default_factory=list)  # of each step, the local batch
    losses: list[float] = field(default_factory=list)
    dense_grads: list[list[Tensor]] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)
    collectives: list[int] = field(default_factory=list)
    keys: list[str] = field(default_factory=list)
    backends: dict[str, str] = field(default_factory=dict)
    out_of_range: int = 0


class Model(nn.Module):
    """A collection under a small dense part; unaware of sharding."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(case.seed)
        if case.sequence:
            configs = [EmbeddingConfig(**table) for table in case.tables]
            self.collection: Any = EmbeddingCollection(tables=configs, out_of_range=case.out_of_range)
        else:
            bags = [EmbeddingBagConfig(**table) for table in case.tables]
            weighted = case.weighted or bool(case.learned)
            self.collection = EmbeddingBagCollection(bags, weighted, out_of_range=case.out_of_range)
        self.places = (
            PositionWeightedModuleCollection(dict.fromkeys(case.learned, 7)) if case.learned else nn.Identity()
        )
        width = sum(table["embedding_dim"] * len(table["feature_names"]) for table in case.tables)
        self.dense = nn.Linear(width, 1)
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -0.5, 0.5, generator=generator)

    def forward(self, features: KeyedJaggedTensor) -> tuple[Tensor, Tensor, list[str]]:
        out = self.collection(self.places(features))
        if isinstance(out, dict):
            values = [jagged.values() for jagged in out.values()]
            flat = torch.cat([value.reshape(-1) for value in values])
            sums = [_sum_rows(jagged) for jagged in out.values()]
            if (inverse := features.inverse_indices_or_none()) is not None:
                sums = [own[inverse[1][n]] for n, own in enumerate(sums)]
            pooled = torch.cat(sums, 1)
            return flat, self.dense(torch.tanh(pooled)), list(out)
        return out.values(), self.dense(torch.tanh(out.values())), list(out.keys())


def _sum_rows(jagged: Any) -> Tensor:
    """``[B, D]`` sums of a jagged tensor, by plain torch."""
    lengths = jagged.lengths()
    rows = jagged.values()
    bag = torch.repeat_interleave(torch.arange(lengths.numel(), device=rows.device), lengths)
    return rows.new_zeros(lengths.numel(), rows.shape[1]).index_add(0, bag, rows)


def batch_of(bags: Bags, weighted: bool = False, inverse: Inverse | None = None) -> KeyedJaggedTensor:
    """A batch from lists, variable with ``inverse``; the weight of an id is a fixed function of its place."""
    keys = list(bags)
    lengths = torch.tensor([len(bag) for key in keys for bag in bags[key]], dtype=torch.int64)
    values = torch.tensor([i for key in keys for bag in bags[key] for i in bag], dtype=torch.int64)
    weights = None
    if weighted:
        weights = torch.tensor(
            [0.5 + ((7 * i + 3 * n) % 11) / 10 for key in keys for bag in bags[key] for n, i in enumerate(bag)]
        )
    if inverse is not None:
        return KeyedJaggedTensor(
            keys,
            values,
            weights,
            lengths=lengths,
            stride_per_key_per_rank=[[len(bags[key])] for key in keys],
            inverse_indices=(keys, torch.tensor([inverse[key] for key in keys], dtype=torch.int64)),
        )
    return KeyedJaggedTensor(keys, values, weights, lengths=lengths, stride=len(next(iter(bags.values()))))


def expand(bags: Bags, inverse: Inverse | None) -> Bags:
    """Every sample with bags of its own."""
    return bags if inverse is None else {key: [bags[key][b] for b in inverse[key]] for key in bags}


def labels_of(bags: Bags) -> Tensor:
    """Labels that depend on the sample's ids alone."""
    samples = len(next(iter(bags.values())))
    sums = [sum(sum(bags[key][b]) for key in bags) for b in range(samples)]
    return torch.tensor([float(total % 2) for total in sums]).reshape(-1, 1)


def join(ranks: list[Bags]) -> Bags:
    """All ranks' batches, one after the other."""
    return {key: [bag for rank in ranks for bag in rank[key]] for key in ranks[0]}


def join_inverses(ranks: list[Bags], inverses: list[Inverse | None]) -> Inverse | None:
    """For the batch of `join`: each rank's bags stand behind those of the ranks before it."""
    joined: Inverse = {key: [] for key in ranks[0]}
    firsts = dict.fromkeys(ranks[0], 0)
    for bags, inverse in zip(ranks, inverses, strict=True):
        if inverse is None:
            return None
        for key in joined:
            joined[key] += [firsts[key] + b for b in inverse[key]]
            firsts[key] += len(bags[key])
    return joined


def attempted(action: Callable[[], Any]) -> str:
    """Type and message of what an action raises; empty if nothing."""
    try:
        action()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def sharders_of(case: Case, **fused_params: Any) -> list[Any]:
    """Sharders of both kinds of collections."""
    fused = {"optimizer": case.optimizer, "learning_rate": case.learning_rate, "eps": case.eps, **fused_params}
    return [
        EmbeddingBagCollectionSharder(fused, case.codecs, backend=case.backend),
        EmbeddingCollectionSharder(fused, case.codecs, case.dedup, backend=case.backend),
    ]


def table_optimizer(case: Case, tables: list[nn.Parameter]) -> torch.optim.Optimizer:
    """The dense twin of the case's optimizer."""
    if case.optimizer == "exact_sgd":
        return torch.optim.SGD(tables, lr=case.learning_rate)
    kind: Any = {"exact_row_wise_adagrad": RowWiseAdagrad, "exact_adagrad": torch.optim.Adagrad}[case.optimizer]
    return kind(tables, lr=case.learning_rate, eps=case.eps)  # type: ignore[no-any-return]


def sharded_model(case: Case) -> tuple[DistributedModelParallel, Model]:
    """The case's model under its plan, and the same without the wrapping."""
    rank = torch.distributed.get_rank()
    model = Model(case if rank == 0 else replace(case, seed=case.seed + 1))  # rank 0's weights must win
    plan = ShardingPlan.from_json(case.plan)
    wrapper = DefaultDataParallelWrapper(find_unused_parameters=case.find_unused)
    dmp = DistributedModelParallel(
        model, device=case.device, plan=plan, sharders=sharders_of(case), data_parallel_wrapper=wrapper
    )
    return dmp, model


def part_of_loss(logits: Tensor, ranks: list[Bags]) -> Tensor:
    """What this rank's samples add to the mean over the global batch."""
    labels = labels_of(ranks[torch.distributed.get_rank()]).to(logits.device)
    samples = sum(len(next(iter(bags.values()))) for bags in ranks)
    return nn.functional.binary_cross_entropy_with_logits(logits, labels, reduction="sum") / samples


def train_sharded(case: Case) -> Result:
    """Runs on every rank."""
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    dmp, model = sharded_model(case)
    dense = torch.optim.SGD(dmp.dense_parameters(), lr=case.learning_rate)
    result = Result(backends=dmp.backends())
    for step, ranks in enumerate(case.steps):
        inverses = case.inverses(step)
        whole = [expand(each, inverse) for each, inverse in zip(ranks, inverses, strict=True)]
        with trace() as traced:
            out, logits, result.keys = dmp(batch_of(ranks[rank], case.weighted, inverses[rank]).to(case.device))
            dense.zero_grad()
            loss = part_of_loss(logits, whole)
            (loss * world).backward()  # gradients are averaged over ranks
        result.outputs.append(out.detach().cpu().clone())
        total = loss.detach().clone()
        torch.distributed.all_reduce(total)
        result.losses.append(float(total))
        result.dense_grads.append([p.grad.cpu().clone() for p in model.dense.parameters()])
        result.collectives.append(traced.count("all_to_all"))
        dense.step()
    result.out_of_range = model.collection.out_of_range_count()
    result.weights = {name: value.cpu().clone() for name, value in dmp.full_state_dict().items()}
    return result


def train_unsharded(case: Case) -> Result:
    """The truth: one process, the global batch, dense parameters under a dense optimizer."""
    model = Model(case)
    sparse = table_optimizer(case, list(model.collection.parameters()))
    dense = torch.optim.SGD([*model.dense.parameters(), *model.places.parameters()], lr=case.learning_rate)
    result = Result()
    for step, ranks in enumerate(case.steps):
        inverses = case.inverses(step)
        bags = join([expand(each, inverse) for each, inverse in zip(ranks, inverses, strict=True)])
        if case.sequence:  # an output a bag, not a sample
            batch = batch_of(join(ranks), inverse=join_inverses(ranks, inverses))
        else:
            batch = batch_of(bags, case.weighted)
        out, logits, result.keys = model(batch)
        sparse.zero_grad()
        dense.zero_grad()
        loss = nn.functional.binary_cross_entropy_with_logits(logits, labels_of(bags))
        loss.backward()
        result.outputs.append(out.detach().clone())
        result.losses.append(float(loss.detach()))
        result.dense_grads.append([p.grad.clone() for p in model.dense.parameters()])
        sparse.step()
        dense.step()
    result.out_of_range = model.collection.out_of_range_count()
    result.weights = {name: value.detach().clone() for name, value in model.state_dict().items()}
    return result
