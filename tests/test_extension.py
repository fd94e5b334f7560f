"""One new scheme, one new kernel, one new view, each defined as a notebook cell would, seen everywhere at once.

The cells are strings, because that is how they reach the ranks: the same text runs here and under ``%%recshard``.
"""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import recshard_lab as rs
from recshard_lab import launcher
from recshard_lab.data import SyntheticRatings
from recshard_lab.embedding import kernels
from recshard_lab.lab import views
from recshard_lab.lab.demo.experiment import plan_of_scheme, run_under, run_unsharded
from recshard_lab.sharding import schemes
from recshard_lab.train import Recipe

SCHEME_CELL = '''
from recshard_lab.sharding.schemes import register_scheme
from recshard_lab.sharding.schemes.base import Proposal, place_default


class TopQuarter:
    """The first quarter of the rows, which are the popular ones, on one rank; the rest on another."""

    name, label, replicated = "top_quarter", "TQ", False

    def propose(self, table, topology, constraints=None):
        cut, whole = table.num_embeddings // 4, (0, table.embedding_dim)
        if cut:
            yield Proposal(self.name, (((0, cut), whole), ((cut, table.num_embeddings), whole)))
        else:
            yield Proposal(self.name, (((0, table.num_embeddings), whole),))

    def default(self, table, topology, ranks=None):
        return place_default(self, table, topology, ranks)


register_scheme(TopQuarter())
'''

KERNEL_CELL = '''
import torch
from recshard_lab.embedding.kernels import LookupKernel, register_kernel


@register_kernel
class Plain(LookupKernel):
    """SGD on sums of bags, one shard feature after the other."""

    name = "plain"

    @classmethod
    def refuses(cls, spec):
        sgd = spec.optimizer is not None and spec.optimizer.optimizer.value == "exact_sgd"
        return None if sgd and spec.pooled and not spec.weighted else "knows only SGD on unweighted bags"

    def forward(self, batch, train):
        lengths, outs, looked_up = batch.offsets.diff().view(len(self.features), -1), [], []
        for shard, own, rows in zip(self.features, lengths, batch.ids.long().split(batch.counts)):
            bags, table = torch.repeat_interleave(torch.arange(len(own)), own.long()), self.weights()[shard]
            outs.append(torch.zeros(len(own), table.shape[1]).index_add_(0, bags, table[rows]))
            looked_up.append((rows, bags))
        return torch.cat(outs, 1), looked_up

    def backward(self, saved, grad, row_norms=None):
        grads = grad.split([self.shards[shard].num_cols for shard in self.features], 1)
        for shard, (rows, bags), own in zip(self.features, saved, grads):
            self.weights()[shard].index_add_(0, rows, own[bags], alpha=-self.optimizer.learning_rate)
'''

VIEW_CELL = """
from recshard_lab.lab.draw.view import message_view
from recshard_lab.lab.views import register_view


@register_view("Shards a rank")
def shards_a_rank(plan, tables):
    shards = [shard for sharding in plan.tables().values() for shard in sharding.shards]
    counts = {rank: sum(shard.rank == rank for shard in shards) for rank in range(plan.world_size)}
    return message_view("shards_a_rank", "Shards a rank", str(counts))
"""


@pytest.fixture(scope="module")
def ratings() -> SyntheticRatings:
    return SyntheticRatings(3000, num_users=120, num_movies=150, why="a test")


@pytest.fixture
def scheme() -> Iterator[str]:
    exec(SCHEME_CELL, {"__name__": "__main__"})
    yield "top_quarter"
    schemes.unregister_scheme("top_quarter")


@pytest.fixture
def kernel() -> Iterator[str]:
    exec(KERNEL_CELL, {"__name__": "__main__"})
    yield "plain"
    del kernels.base._KERNELS["plain"]


@pytest.fixture
def view() -> Iterator[str]:
    exec(VIEW_CELL, {"__name__": "__main__"})
    yield "shards_a_rank"
    views.unregister_view("shards_a_rank")


def test_a_new_scheme_is_planned_estimated_shown_and_read_back(scheme: str, ratings: SyntheticRatings) -> None:
    tables = Recipe().tables(ratings)
    wish = {"movie": rs.ParameterConstraints(sharding_types=[scheme])}
    planner = rs.EmbeddingShardingPlanner(rs.Topology(2), constraints=wish)
    plan = planner.plan_tables(tables)
    assert plan.tables()["movie"].sharding_type == scheme
    assert [shard.rows for shard in plan.tables()["movie"].shards] == [(0, 37), (37, 150)]
    assert scheme in plan.show()
    assert rs.ShardingPlan.from_json(plan.to_json()) == plan
    assert rs.estimate(plan, tables, rs.Topology(2)).fits


def test_a_new_scheme_is_drawn_by_every_view(scheme: str, ratings: SyntheticRatings) -> None:
    tables = Recipe().tables(ratings)
    plan = plan_of_scheme(scheme, tables, 2)
    known: dict[str, Any] = {"plan": plan, "tables": tables, "topology": rs.Topology(2)}
    known["estimate"] = rs.estimate(plan, tables, rs.Topology(2))
    drawn = [views.draw(name, **known) for name in views.views_of(*known)]
    assert len(drawn) >= 4
    assert not [picture.problem for picture in drawn if picture.problem]
    assert "top quarter" in views.placement(plan, tables).svg


def test_a_new_scheme_trains_as_the_unsharded_model_does(scheme: str, ratings: SyntheticRatings) -> None:
    train, test = ratings.split("random")
    recipe = Recipe(epochs=1, batch_size=256)
    plan = plan_of_scheme(scheme, Recipe().tables(ratings), 2)
    with launcher.launch(2) as ranks:  # rectangles are all that ranks need: the scheme stays here
        sharded = run_under(ranks, plan, train, test, recipe)
    truth = run_unsharded(train, test, recipe)
    torch.testing.assert_close(sharded.losses, truth.losses, rtol=1e-3, atol=0)  # Adam magnifies rounding


def test_a_new_kernel_refuses_in_its_own_words_what_it_cannot_do(kernel: str) -> None:
    with pytest.raises(ValueError, match="knows only SGD on unweighted bags"):
        rs_model(kernel, optimizer=rs.embedding.EmbOptimType.EXACT_ROWWISE_ADAGRAD)


def test_a_new_kernel_runs_on_ranks_with_the_numbers_of_the_others(kernel: str) -> None:
    losses = {}
    with launcher.launch(2) as ranks:
        ranks.exec(KERNEL_CELL)
        for name in (kernel, "native"):
            losses[name] = ranks.run(train_a_little, name)
    torch.testing.assert_close(losses[kernel], losses["native"], rtol=1e-6, atol=1e-7)


def test_a_new_view_is_offered_wherever_its_arguments_are_at_hand(view: str, ratings: SyntheticRatings) -> None:
    tables = Recipe().tables(ratings)
    assert view in views.views_of("plan", "tables")
    assert view not in views.views_of("losses")
    widget = rs.PlanCompare(tables, rs.Topology(2), schemes=dict.fromkeys(ratings.features, "row_wise"))
    assert "Shards a rank" in [label for label, _ in widget.picture.options]
    widget.picture.value = view
    assert "{0: 6, 1: 6}" in widget.pictures["mine"].value


def test_a_view_that_fails_says_so_instead_of_ending_the_cell() -> None:
    @views.register_view("Broken")
    def broken(plan: Any) -> Any:
        raise KeyError("movies")

    try:
        assert "KeyError: 'movies'" in views.draw("broken", plan=None).text
    finally:
        views.unregister_view("broken")


def rs_model(backend: str, optimizer: Any = None, device: str = "cpu") -> Any:
    """Two small tables, one read by two features, under a mixed plan for the ranks there are."""
    torch.manual_seed(0)
    tables = [
        rs.EmbeddingBagConfig(name="a", num_embeddings=11, embedding_dim=8, feature_names=["f", "g"]),
        rs.EmbeddingBagConfig(name="b", num_embeddings=7, embedding_dim=8, feature_names=["h"]),
    ]
    cuts = {"a": rs.row_wise(), "b": rs.column_wise()}
    collection = rs.EmbeddingBagCollection(tables)
    plan = rs.ShardingPlan({"": rs.sharding.construct_module_sharding_plan(collection, cuts)})
    fused = {"learning_rate": 0.1, "optimizer": optimizer or rs.embedding.EmbOptimType.EXACT_SGD}
    sharders = [rs.distributed.EmbeddingBagCollectionSharder(fused_params=fused, backend=backend)]
    return rs.DistributedModelParallel(collection, plan=plan, sharders=sharders)


def train_a_little(backend: str) -> list[float]:
    """Losses of a few steps; the same batches for every backend, others on every rank."""
    model, losses = rs_model(backend), []
    draw = torch.Generator().manual_seed(torch.distributed.get_rank())
    for _ in range(5):
        lengths = torch.randint(0, 4, (12,), generator=draw)
        ids = torch.randint(0, 7, (int(lengths.sum()),), generator=draw)
        out = model(rs.KeyedJaggedTensor(["f", "g", "h"], ids, lengths=lengths)).values()
        loss = (out - 1).square().mean()
        loss.backward()
        losses.append(float(loss))
    return losses
