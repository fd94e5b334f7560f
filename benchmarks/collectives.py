"""Collectives of one training step: how many, of which kind, how many bytes a rank, by scheme, route and batch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from benchmarks import Figure
from benchmarks.apparatus.step_case import BY_NODE, FLAT, ROWWISE, SGD, SHORT, StepCase
from benchmarks.apparatus.step_ours import batch_of, collection_of
from recshard_lab.comm import trace
from recshard_lab.distributed import DistributedModelParallel, EmbeddingBagCollectionSharder
from recshard_lab.sharding import scheme_names
from recshard_lab.sharding.plan.types import ROUTES
from recshard_lab.sparse import KeyedJaggedTensor

RANKS, NODES = 4, 2
KINDS = ("all_to_all", "reduce_scatter", "all_gather")
COLUMN_CUTTING = ("column_wise", "table_column_wise", "grid_shard", "mixed")


@dataclass(frozen=True)
class Counted:
    """A training step whose collectives are counted.

    Args:
        case: tables, batch, scheme and optimizer.
        route: the output path.
        variable: whether each feature brings only its distinct bags, half as many as samples (VBE).
    """

    case: StepCase
    route: str
    variable: bool

    @property
    def name(self) -> str:
        """As people read it.

        >>> Counted(StepCase("row_wise", SGD, "zipf"), "two_hop", False).name
        'row_wise, two_hop, SGD'
        """
        return ", ".join(
            [self.case.layout, self.route, SHORT[self.case.optimizer], *(["variable batch"] if self.variable else [])]
        )

    @property
    def most(self) -> int:
        """The most collectives that this step may use, for any number of tables.

        Sizes, ids, rows and gradients take one each. Replicas need none for rows. Two hops take two for rows and two
        for gradients. A plan with several output paths pays for each. A variable batch always takes the direct path.
        Row-wise Adagrad adds one if columns are sharded: it sums the squares of whole rows.
        """
        if self.case.layout == "data_parallel":
            return 3
        if self.variable or self.route == "direct":
            rows_and_gradients = 2
        elif self.case.layout == "mixed":  # replicas' gradients, and rows that reduce_scatter need not add, go directly
            rows_and_gradients = {"reduce_scatter": 4, "two_hop": 5}[self.route]
        elif self.case.layout == "flex_shard":  # the same, where all rows are added
            rows_and_gradients = {"reduce_scatter": 3, "two_hop": 5}[self.route]
        else:
            rows_and_gradients = {"reduce_scatter": 2, "two_hop": 4}[self.route]
        return 2 + rows_and_gradients + (self.case.optimizer == ROWWISE and self.case.layout in COLUMN_CUTTING)


def counted() -> list[Counted]:
    """Every scheme under every route, with either batch; row-wise Adagrad under the direct one."""
    layouts = [*FLAT, *BY_NODE, *(name for name in scheme_names() if name not in (*FLAT, *BY_NODE))]
    return [
        Counted(_case(layout, optimizer), route, variable)
        for layout in layouts
        for optimizer in (SGD, ROWWISE)
        for route in ROUTES
        for variable in (False, True)
        if route == "direct" or (optimizer == SGD and layout != "data_parallel")
    ]


def _case(layout: str, optimizer: str) -> StepCase:
    local = RANKS // NODES
    return StepCase(layout, optimizer, "zipf", rows=1000, batch=64, pooling=5, ranks=RANKS, local_ranks=local)


def figures() -> list[Figure]:
    """Collectives of each step; beside them the number of each kind, and the largest bytes that a rank sends."""
    from recshard_lab.launcher import launch

    wanted = counted()
    with launch(RANKS, nodes=NODES) as ranks:
        counts = ranks.run(count, wanted)
    found = []
    for step, *own in zip(wanted, *counts, strict=True):
        kinds = own[0].kinds
        beside = {kind: float(kinds[kind]) for kind in KINDS}
        beside["kB sent"] = max(each.sent for each in own) / 1e3
        beside["kB across nodes"] = max(each.across_nodes for each in own) / 1e3
        found.append(Figure(step.name, sum(kinds.values()), "collectives", target=step.most, beside=beside))
    return found


@dataclass(frozen=True)
class Count:
    """What one rank saw of a step: collectives by kind, bytes it sent to other ranks, and to other nodes."""

    kinds: Counter[str]
    sent: int
    across_nodes: int


def count(wanted: Sequence[Counted]) -> list[Count]:
    """On a rank, for each step."""
    rank, found = torch.distributed.get_rank(), []
    for step in wanted:
        case = step.case
        dmp = DistributedModelParallel(
            collection_of(case),
            plan=case.plan().with_route(step.route),
            sharders=[EmbeddingBagCollectionSharder({"optimizer": case.optimizer})],
        )
        features = batch(case, rank, step.variable)
        with trace() as traced:
            dmp(features).values().sum().backward()
        kinds = Counter(event.op for event in traced.events)
        across = traced.inter_node_bytes()
        found.append(Count(kinds, across + traced.intra_node_bytes(), across))
    return found


def batch(case: StepCase, rank: int, variable: bool) -> KeyedJaggedTensor:
    """A rank's batch; the variable one has half as many bags of each feature, each of two samples."""
    if not variable:
        return batch_of(case, rank=rank)
    keys = [f"f{number}" for number in range(case.tables)]
    ids = torch.from_numpy(case.bag_ids(rank, 0)).view(case.tables, case.batch, case.pooling)
    bags = case.batch // 2
    return KeyedJaggedTensor(
        keys,
        ids[:, :bags].flatten(),
        lengths=torch.full((case.tables * bags,), case.pooling),
        stride_per_key_per_rank=[[bags]] * case.tables,
        inverse_indices=(keys, torch.arange(case.batch).div(2, rounding_mode="floor").repeat(case.tables, 1)),
    )
