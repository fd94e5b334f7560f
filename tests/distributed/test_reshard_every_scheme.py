"""A model that is resharded from every scheme into every other keeps its optimizer state and goes on learning.

One model walks over all ordered pairs of schemes, and trains a step on each. Its twin is trained unsharded.
"""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import recshard_lab
from recshard_lab import DistributedModelParallel, FusedEmbeddingBagCollection
from recshard_lab.distributed import EmbeddingBagCollectionSharder
from recshard_lab.sharding.schemes import scheme_names
from tests.distributed import cases, state_jobs
from tests.distributed.jobs import Bags, batch_of, join
from tests.distributed.optimizer_jobs import collection_of, configs_of, mixing, plan_at

ONE_NODE = ["table_wise", "row_wise", "column_wise", "flex_shard", "data_parallel"]  # others are these on one node
OTHER_NAMES = {"exp_avg_sq": "momentum2"}  # of a state, as torch's optimizers call it


def walk(names: list[str]) -> list[str]:
    """Names in an order in which each stands before each other one, once (Hierholzer's circuit)."""
    left = {name: [other for other in reversed(names) if other != name] for name in names}
    path, circuit = [names[0]], []
    while path:
        if left[path[-1]]:
            path.append(left[path[-1]].pop())
        else:
            circuit.append(path.pop())
    return circuit[::-1]


def walked(plans: dict[str, str], order: list[str], steps: list[list[Bags]], fused: dict[str, Any]) -> list[str]:
    """Runs on every rank: what differs from the twin, after which move."""
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    sharders = [EmbeddingBagCollectionSharder(fused_params=fused)]
    first = plan_at("", plans[order[0]])
    dmp = DistributedModelParallel(collection_of(cases.TABLES), plan=first, sharders=sharders)
    kept = dict(fused)
    twin = FusedEmbeddingBagCollection(configs_of(cases.TABLES), kept.pop("optimizer"), kept, backend="native")
    twin.load_state_dict(collection_of(cases.TABLES).state_dict())
    wrong: list[str] = []
    for number, (before, scheme) in enumerate(zip([order[0], *order], order, strict=False)):
        if number:
            dmp.reshard(plan_at("", plans[scheme]))
        ranks = steps[number % len(steps)]
        sizes = [len(next(iter(bags.values()))) for bags in ranks]
        out = dmp(batch_of(ranks[rank])).values()
        (out * mixing(sizes[rank], out.shape[1], sum(sizes[:rank]))).sum().mul(world).backward()
        out = twin(batch_of(join(ranks))).values()
        (out * mixing(out.shape[0], out.shape[1], 0)).sum().backward()
        wrong += [f"a step after {before} -> {scheme}: {name}" for name in differs(dmp, twin)]
    return wrong


def differs(dmp: DistributedModelParallel, twin: FusedEmbeddingBagCollection) -> list[str]:
    """Names of weights and states that are not the twin's."""
    found = state_jobs.everything(dmp)
    states = {table: dict(own) for table, own in twin.optimizer_states().items()}
    wrong = []
    for key, value in found.items():
        if "/" in key:
            table, name = key.split("/")[1].split(".")
            truth = states[table].pop(OTHER_NAMES.get(name, name))
        else:
            truth = twin.embedding_bags[key.split(".")[1]].weight.detach()
        scale = float(truth.abs().max().clamp(min=1e-3))
        if not float((value.view(truth.shape) - truth).abs().max()) <= 1e-4 * scale:
            wrong.append(key)
    return wrong + [f"{table}: {left} is not in the state dict" for table, own in states.items() for left in own]


@pytest.fixture(scope="module")
def ranks(request: pytest.FixtureRequest) -> Iterator[Any]:
    """So many ranks, two a node."""
    with recshard_lab.launch(request.param, nodes=request.param // 2) as launched:
        yield launched


@pytest.mark.parametrize(
    ("ranks", "optimizer"),
    [
        pytest.param(2, "exact_row_wise_adagrad", marks=pytest.mark.gate),
        *(
            pytest.param(ranks, optimizer, marks=pytest.mark.nightly)
            for ranks, optimizer in [(2, "exact_adagrad"), (2, "adam"), (2, "lamb"), (4, "partial_row_wise_adam")]
        ),
    ],
    indirect=["ranks"],
)
def test_state_goes_from_every_scheme_into_every_scheme(ranks: Any, optimizer: str) -> None:
    names = list(scheme_names()) if ranks.nodes > 1 else ONE_NODE
    plans = {name: cases.plan_of(cases.TABLES, [name], ranks.world_size).to_json() for name in names}
    steps = cases.random_steps(3, cases.TABLES, ranks.world_size, steps=4, samples=4)
    fused = {"optimizer": optimizer, "learning_rate": 0.02, "eps": 0.01}
    for wrong in ranks.run(walked, plans, walk(names), steps, fused):
        assert not wrong
