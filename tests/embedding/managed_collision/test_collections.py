"""Managed collision in front of collections: no row is read by an id that another one trained."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import recshard_lab as rs
from recshard_lab import embedding
from recshard_lab.embedding.managed_collision.collections import first_rows
from recshard_lab.optim import RowWiseAdagrad

ROWS, DIM = 8, 4
DENSE: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda own: torch.optim.SGD(own, 0.5),
    "momentum": lambda own: torch.optim.SGD(own, 0.5, momentum=0.9),
    "adagrad": lambda own: torch.optim.Adagrad(own, 0.5, initial_accumulator_value=0.1),
    "adam": lambda own: torch.optim.Adam(own, 0.5),
    "row-wise adagrad": lambda own: RowWiseAdagrad(own, lr=0.5),
}
FUSED: dict[str, tuple[Any, dict[str, float]]] = {
    "fused sgd": (torch.optim.SGD, {"lr": 0.5}),
    "fused adagrad": (torch.optim.Adagrad, {"lr": 0.5}),
    "fused adam": (embedding.EmbOptimType.ADAM, {"lr": 0.5}),
    "fused row-wise adagrad": (RowWiseAdagrad, {"lr": 0.5}),
}
MODULES: dict[str, Callable[[int], Any]] = {
    "mch": lambda rows: embedding.MCHManagedCollisionModule(rows, "cpu", embedding.LRU_EvictionPolicy(), 1),
    "zch": lambda rows: embedding.HashZchManagedCollisionModule(
        rows, "cpu", 1, eviction_policy_name=embedding.HashZchEvictionPolicyName.LRU_EVICTION
    ),
}


def made(pooled: bool, optimizer: str, module: str, **more: Any) -> tuple[Any, torch.optim.Optimizer | None]:
    """A collection of one table, and its torch optimizer."""
    torch.manual_seed(0)
    kind = rs.EmbeddingBagConfig if pooled else rs.EmbeddingConfig
    tables: Any = [kind(ROWS, DIM, "t", feature_names=["f"], **more)]
    modules = embedding.ManagedCollisionCollection({"t": MODULES[module](ROWS)}, tables)
    inner: Any
    if optimizer in FUSED:
        which: Any = rs.FusedEmbeddingBagCollection if pooled else embedding.FusedEmbeddingCollection
        inner = which(tables, *FUSED[optimizer])
    else:
        inner = rs.EmbeddingBagCollection(tables) if pooled else rs.EmbeddingCollection(tables)
    outer = (
        embedding.ManagedCollisionEmbeddingBagCollection if pooled else embedding.ManagedCollisionEmbeddingCollection
    )
    collection = outer(inner, modules, True)
    return collection, DENSE[optimizer](collection.parameters()) if optimizer in DENSE else None


def batch_of(*ids: int) -> rs.KeyedJaggedTensor:
    """Each id is a bag."""
    return rs.KeyedJaggedTensor(["f"], torch.tensor(ids), lengths=torch.ones(len(ids), dtype=torch.int64))


def values_of(output: Any) -> Tensor:
    return output["f"].values() if isinstance(output, dict) else output.values()  # type: ignore[no-any-return]


def step(collection: Any, optimizer: torch.optim.Optimizer | None, *ids: int) -> Tensor:
    """One training step, whose gradient differs for each id. Returns the rows before it."""
    if optimizer is not None:
        optimizer.zero_grad()
    rows = values_of(collection(batch_of(*ids))[0])
    (rows * torch.arange(1.0, len(ids) + 1)[:, None]).sum().backward()
    if optimizer is not None:
        optimizer.step()
    return rows.detach()


def first(collection: Any, *ids: int) -> Tensor:
    """The initial rows of ids."""
    return first_rows(collection._configs()[0], torch.tensor(ids), (0, DIM), torch.float32)


CASES = [(True, name) for name in [*DENSE, *FUSED]] + [(False, name) for name in ("adam", "fused adagrad")]


@pytest.mark.parametrize("module", MODULES)
@pytest.mark.parametrize(("pooled", "optimizer"), CASES)
def test_the_successor_of_an_evicted_id_starts_anew(pooled: bool, optimizer: str, module: str) -> None:
    """The demonstration of stale rows. TorchRec 1.8 leaves the row, its optimizer state, or both."""
    collection, stepping = made(pooled, optimizer, module)
    first_ids, new_ids = range(100, 107), range(200, 207)
    for _ in range(3):
        step(collection, stepping, *first_ids)
    found = step(collection, stepping, *new_ids)
    assert torch.equal(found, first(collection, *new_ids)), "the first row that a new id reads"
    fresh, other = made(pooled, optimizer, module)
    for _ in range(0 if optimizer not in ("adam", "fused adam") else 3):
        step(fresh, other, *first_ids)  # Adam counts the steps of the whole table
    if "adam" not in optimizer:
        step(fresh, other, *new_ids)
        after, expected = (step(own, using, *new_ids) for own, using in ((collection, stepping), (fresh, other)))
        assert torch.equal(after, expected), "the second row, after a step with new optimizer states"
    collection.eval()
    back = values_of(collection(batch_of(*first_ids))[0])
    old = values_of(collection(batch_of(*new_ids))[0])
    if module == "mch":  # an evicted id reads the last row
        assert not any(torch.equal(row, other_row) for row in back for other_row in old)


@pytest.mark.parametrize("optimizer", ["adam", "fused adam"])
@pytest.mark.parametrize("module", MODULES)
def test_optimizer_states_of_a_new_owner_are_those_of_a_new_row(optimizer: str, module: str) -> None:
    collection, stepping = made(True, optimizer, module)
    for _ in range(3):
        step(collection, stepping, *range(100, 107))
    collection(batch_of(*range(200, 207)))
    if stepping is not None:
        weight = collection.embedding_module.embedding_bags["t"].weight
        weight.grad.zero_()
        stepping.step()
        states = {name: own for name, own in stepping.state[weight].items() if own.dim()}
    else:
        states = {
            name: own for name, own in collection.embedding_module.optimizer_states()["t"].items() if len(own) == ROWS
        }
    rows = collection.managed_collision_collection.modules_by_table()["t"].find(torch.arange(200, 207))
    assert len(states) == 2
    assert all(not own[rows].any() for own in states.values())


@pytest.mark.parametrize("pooled", [True, False])
def test_ids_do_not_share_rows_that_are_free(pooled: bool) -> None:
    """The demonstration of collisions. In TorchRec 1.8 on a CPU, the zero-collision hash has them in an empty table."""
    collection, _ = made(pooled, "sgd", "zch")
    ids = [3, 3 + 2**40, 3 + 2**41, 3 - 2**50, 11, 19, 27, 35]
    out, rows = collection(batch_of(*ids))
    assert sorted(rows.values().tolist()) == list(range(ROWS))
    assert torch.equal(values_of(out), first(collection, *ids))


@pytest.mark.parametrize("optimizer", ["sgd", "fused sgd"])
@pytest.mark.parametrize("module", MODULES)
def test_a_gradient_reaches_the_id_that_was_looked_up(optimizer: str, module: str) -> None:
    """Of two batches under way, the second may not take the rows of the first."""
    collection, stepping = made(True, optimizer, module)
    early = collection(batch_of(*range(7)))[0].values()
    late = collection(batch_of(*range(50, 57)))[0].values()
    early.sum().backward()
    if stepping is not None:
        stepping.step()
    collection.eval()
    assert torch.allclose(values_of(collection(batch_of(*range(7)))[0]), first(collection, *range(7)) - 0.5)
    del late
    collection.train()
    assert torch.equal(values_of(collection(batch_of(*range(50, 57)))[0]), first(collection, *range(50, 57)))


def test_a_gradient_that_waits_for_its_step_does_not_reach_the_successor() -> None:
    collection, stepping = made(True, "sgd", "zch")
    assert stepping is not None
    collection(batch_of(*range(8)))[0].values().sum().backward()
    collection(batch_of(*range(50, 58)))[0].values().sum().backward()
    stepping.step()
    collection.eval()
    assert torch.allclose(values_of(collection(batch_of(*range(50, 58)))[0]), first(collection, *range(50, 58)) - 0.5)


def test_reset_rows_get_the_tables_init_function() -> None:
    collection, stepping = made(True, "sgd", "zch", init_fn=lambda weight: nn.init.constant_(weight, 7.0))
    step(collection, stepping, *range(8))
    assert torch.equal(step(collection, stepping, *range(50, 58)), torch.full((8, DIM), 7.0))


@pytest.mark.parametrize("variable", [False, True])
def test_any_order_of_keys_and_variable_batches(variable: bool) -> None:
    tables = [rs.EmbeddingBagConfig(ROWS, DIM, f"t{name}", feature_names=[name]) for name in "ab"]
    modules = {table.name: MODULES["zch"](ROWS) for table in tables}
    collection = embedding.ManagedCollisionEmbeddingBagCollection(
        rs.EmbeddingBagCollection(tables), embedding.ManagedCollisionCollection(modules, tables), True
    )
    more: dict[str, Any] = {}
    if variable:
        inverse = (["b", "x", "a"], torch.tensor([[0, 0, 0], [0, 0, 0], [0, 1, 0]]))
        more = {"stride_per_key_per_rank": [[1], [1], [2]], "inverse_indices": inverse}
    lengths = [2, 1, 1, 2] if variable else [2, 1, 1, 0, 0, 0, 1, 2, 0]
    batch = rs.KeyedJaggedTensor(
        ["b", "x", "a"], torch.arange(sum(lengths)) + 1000, lengths=torch.tensor(lengths), **more
    )
    out, rows = collection(batch)
    assert out.keys() == ["a", "b"]
    assert rows.keys() == ["a", "b"]
    of_a = batch["a"].values()
    expected = first_rows(tables[0], of_a, (0, DIM), torch.float32)
    assert torch.allclose(out["a"][0], expected[: int(batch["a"].lengths()[0])].sum(0))


def test_other_tables_or_collections_are_refused() -> None:
    table, other = (rs.EmbeddingBagConfig(ROWS, DIM, "t", feature_names=[name]) for name in "fg")
    modules = embedding.ManagedCollisionCollection({"t": MODULES["zch"](ROWS)}, [other])
    with pytest.raises(ValueError, match="different tables"):
        embedding.ManagedCollisionEmbeddingBagCollection(rs.EmbeddingBagCollection([table]), modules)
    with pytest.raises(ValueError, match="the collection is a Linear"):
        embedding.ManagedCollisionEmbeddingBagCollection(nn.Linear(2, 2), modules)
