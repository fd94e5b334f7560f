"""Outputs are waited for when they are first used; their exchanges travel while the model computes something else."""

import pickle
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from recshard_lab import EmbeddingBagCollection, EmbeddingBagConfig, EmbeddingCollection, EmbeddingConfig, row_wise
from recshard_lab.comm import ShardingEnv
from recshard_lab.comm.trace import trace
from recshard_lab.distributed import LazyAwaitable, shard
from tests.distributed.jobs import batch_of
from tests.launched import launched

TABLE = {"name": "t", "num_embeddings": 10, "embedding_dim": 4, "feature_names": ["f"]}


def collection(pooled: bool = True, route: str = "direct") -> Any:
    """A row-wise collection over all ranks."""
    torch.manual_seed(0)
    if pooled:
        plan = row_wise(route=route)
        return shard(EmbeddingBagCollection([EmbeddingBagConfig(**TABLE)]), plan, ShardingEnv.default())
    return shard(EmbeddingCollection([EmbeddingConfig(**TABLE)]), row_wise(), ShardingEnv.default())


def waited(traced: Any, label: str) -> list[bool]:
    """For each exchange of this kind, whether it was waited for."""
    return [event.ms > 0 for event in traced.events if event.label.startswith(label)]


pair = launched(2, nodes=2)


def use_of_an_output(pooled: bool) -> tuple[list[bool], list[bool], bool]:
    sharded, batch = collection(pooled), batch_of({"f": [[1, 7], [3]]})
    with trace() as traced:
        out = sharded(batch)
        before = waited(traced, "output_dist/")
        with torch.no_grad():  # the first use need not be a training step's
            rows = (out if pooled else out["f"]).values()
        return before, waited(traced, "output_dist/"), rows.requires_grad


@pytest.mark.parametrize("pooled", [True, False])
def test_an_output_is_waited_for_when_it_is_first_used(pair: Any, pooled: bool) -> None:
    for before, after, gradient in pair.run(use_of_an_output, pooled):
        assert before == [False]
        assert after == [True]
        assert gradient


def dense_work_between(route: str) -> tuple[list[bool], list[bool]]:
    """Whether the gradient exchange had been waited for when the dense layer got its gradient, and at the end."""
    sharded, batch, dense = collection(route=route), batch_of({"f": [[1, 7], [3]]}), nn.Linear(3, 4)
    seen = []
    with trace() as traced:
        out = sharded(batch)
        bottom = dense(torch.ones(2, 3))
        dense.weight.register_hook(lambda _: seen.append(waited(traced, "output_dist_backward/")))
        (out.values() * bottom).sum().backward()
        return seen[0], waited(traced, "output_dist_backward/")


@pytest.mark.parametrize(("route", "messages"), [("direct", 1), ("two_hop", 2)])
def test_gradients_travel_during_the_backward_of_dense_layers(pair: Any, route: str, messages: int) -> None:
    assert pair.run(dense_work_between, route) == [([False], [True] * messages)] * 2


def test_a_graph_of_gradients_is_refused_with_a_change() -> None:
    out = collection()(batch_of({"f": [[1, 7], [3]]}))
    with pytest.raises(RuntimeError, match=r"create_graph=True reached a sharded lookup.*Fix: "):
        out.values().square().sum().backward(create_graph=True)


def test_a_lazy_output_is_a_keyed_tensor_in_every_use() -> None:
    sharded, batch = collection(), batch_of({"f": [[1, 7], [3]]})
    expected = sharded(batch).values()
    assert isinstance(sharded(batch), LazyAwaitable)
    assert sharded(batch).keys() == ["f"]
    assert torch.equal(sharded(batch)["f"], expected)
    assert torch.equal(sharded(batch).wait().values(), expected)
    with torch.no_grad():
        assert torch.equal(pickle.loads(pickle.dumps(sharded(batch))).values(), expected)
    leaves, spec = tree_flatten(sharded(batch))
    assert torch.equal(tree_unflatten(leaves, spec).values(), expected)
    with pytest.raises(AttributeError, match="no attribute 'absent'"):
        _ = sharded(batch).absent


def test_lazy_sequences_are_jagged_tensors_in_every_use() -> None:
    sharded, batch = collection(pooled=False), batch_of({"f": [[1, 7], [3]]})
    expected = sharded(batch)["f"].values()
    with torch.no_grad():
        assert torch.equal(pickle.loads(pickle.dumps(sharded(batch)))["f"].values(), expected)
    leaves, spec = tree_flatten(sharded(batch))
    assert torch.equal(tree_unflatten(leaves, spec)["f"].values(), expected)
