"""Dynamic collections against static tables of the same ids."""

from __future__ import annotations

import copy
import gc
import pickle
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

import recshard_lab as rs
from recshard_lab.embedding import EmbOptimType, FusedEmbeddingCollection, RowWiseAdagrad
from recshard_lab.embedding.dynamic.collections import DynamicEmbeddingBagCollection, DynamicEmbeddingCollection
from recshard_lab.embedding.dynamic.config import DynamicEmbeddingConfig
from recshard_lab.embedding.kernels import KernelInput
from recshard_lab.sparse import KeyedJaggedTensor

VOCABULARY = torch.randint(-(1 << 60), 1 << 60, (1500,), generator=torch.Generator().manual_seed(0))
OPTIMIZERS = [
    (torch.optim.SGD, {"lr": 0.1}),
    (torch.optim.Adagrad, {"lr": 0.1}),
    (RowWiseAdagrad, {"lr": 0.1}),
    (EmbOptimType.ADAM, {"lr": 0.01}),
]


def bag_pair(
    optimizer: Any, arguments: dict[str, Any], weighted: bool = False, names: tuple[str, ...] = ("user", "item")
) -> tuple[Any, Any]:
    """A dynamic collection that starts small, and a static one with the initial rows of `VOCABULARY`."""
    own: list[DynamicEmbeddingConfig] = [
        DynamicEmbeddingConfig("user", 8, 128, 1 << 13, ["u", "v"]),
        DynamicEmbeddingConfig("item", 16, 256, 1 << 13, ["u"], pooling=rs.PoolingType.MEAN),
    ][: len(names)]
    tables = [
        rs.EmbeddingBagConfig(1500, t.embedding_dim, t.name, feature_names=t.feature_names, pooling=t.pooling)
        for t in own
    ]
    dynamic = DynamicEmbeddingBagCollection(own, optimizer, arguments, is_weighted=weighted)
    static = rs.FusedEmbeddingBagCollection(tables, optimizer, arguments, is_weighted=weighted)
    for name in names:
        static.state_dict()[f"embedding_bags.{name}.weight"].copy_(dynamic.table(name).initial(VOCABULARY))
    return dynamic, static


def batches(count: int, weighted: bool = False, seed: int = 0) -> list[tuple[KeyedJaggedTensor, KeyedJaggedTensor]]:
    """Batches by id, and the same by position in `VOCABULARY`."""
    rng = torch.Generator().manual_seed(seed)
    made = []
    for _ in range(count):
        lengths = torch.randint(0, 9, (2 * 16,), generator=rng)
        at = torch.randint(0, 1500, (int(lengths.sum()),), generator=rng)
        weights = torch.rand(len(at), generator=rng) if weighted else None
        made.append(tuple(KeyedJaggedTensor(["u", "v"], values, weights, lengths) for values in (VOCABULARY[at], at)))
    return made  # type: ignore[return-value]


@pytest.mark.parametrize(("optimizer", "arguments"), OPTIMIZERS)
@pytest.mark.parametrize("weighted", [False, True])
def test_a_table_that_evicts_nothing_trains_as_a_static_one(optimizer: Any, arguments: Any, weighted: bool) -> None:
    dynamic, static = bag_pair(optimizer, arguments, weighted)
    for by_id, by_position in batches(25, weighted):
        mine, other = dynamic(by_id), static(by_position)
        assert mine.keys() == other.keys() == ["u@user", "v", "u@item"]
        torch.testing.assert_close(mine.values(), other.values())
        mine.values().pow(2).sum().backward()
        other.values().pow(2).sum().backward()
    assert dynamic.table("user").capacity > 1024  # it grew
    assert dynamic.counters()["user"]["fast"]["evictions"] == 0
    dynamic.eval()
    before = copy.deepcopy(dynamic.state_dict())
    for by_id, by_position in batches(5, weighted, seed=9):  # ids that never occurred among them
        torch.testing.assert_close(dynamic(by_id).values(), static(by_position).values())
    after = dynamic.state_dict()["_extra_state"]
    for name, own in before["_extra_state"].items():
        assert torch.equal(own["weight"], after[name]["weight"])
        for field in ("keys", "accesses", "tags"):
            assert torch.equal(own["index"][field], after[name]["index"][field])


@pytest.mark.parametrize("weighted", [False, True])
def test_a_table_grows_between_the_passes_of_a_batch(weighted: bool) -> None:
    dynamic, static = bag_pair(torch.optim.Adagrad, {"lr": 0.1}, weighted)
    data, grown = batches(12, weighted), 0
    for first in range(0, len(data), 6):
        outputs = []
        for by_id, by_position in data[first : first + 6]:
            for batch in (by_id, by_position):
                if weighted:
                    batch.weights().requires_grad_()
            before = dynamic.table("user").capacity
            outputs.append((dynamic(by_id).values(), static(by_position).values()))
            grown += len(outputs) > 1 and dynamic.table("user").capacity > before
        for mine, other in outputs:
            torch.testing.assert_close(mine, other)
            mine.pow(2).sum().backward()
            other.pow(2).sum().backward()
        for by_id, by_position in data[first : first + 6] if weighted else ():
            torch.testing.assert_close(by_id.weights().grad, by_position.weights().grad)
    assert grown == 1  # while other batches waited for their backward
    assert [own["fast"]["evictions"] for own in dynamic.counters().values()] == [0, 0]


@pytest.mark.parametrize("threads", [1, 2])
def test_a_table_grows_while_another_thread_trains(threads: int) -> None:
    """The batch after the next one is prefetched before, or during, the backward pass of a batch."""
    dynamic, static = bag_pair(torch.optim.SGD, {"lr": 0.1}, names=("user",))
    kernel, data = dynamic._kernel, batches(40, seed=3)
    inputs = [KernelInput(own.values(), own.offsets(), None, own.length_per_key()) for own, _ in data]
    with ThreadPoolExecutor(1) as pool:
        prefetched = kernel.prefetch(inputs[0])
        for number, (_, by_position) in enumerate(data):
            rows, saved = kernel.forward(inputs[number]._replace(prefetched=prefetched), True)
            coming = pool.submit(kernel.prefetch, inputs[min(number + 1, len(data) - 1)])
            if threads == 1:
                coming.result()
            kernel.backward(saved, 2 * rows)
            prefetched = coming.result()
            expected = static(by_position).values()
            torch.testing.assert_close(rows, expected)
            expected.pow(2).sum().backward()
    assert dynamic.table("user").capacity > 1024


def test_weights_get_gradients_from_absent_ids() -> None:
    dynamic, static = bag_pair(torch.optim.SGD, {"lr": 0.1}, weighted=True)
    (by_id, by_position), *_ = batches(1, weighted=True)
    for collection, batch in ((dynamic.eval(), by_id), (static, by_position)):
        batch.weights().requires_grad_()
        collection(batch).values().pow(2).sum().backward()
    torch.testing.assert_close(by_id.weights().grad, by_position.weights().grad)


def test_a_variable_batch_is_looked_up_by_its_inverse_indices() -> None:
    dynamic, static = bag_pair(torch.optim.SGD, {"lr": 0.1})
    at = torch.tensor([4, 5, 6, 7, 8])
    inverse = ["v", "u"], torch.tensor([[0, 0, 1], [2, 1, 0]])
    results = []
    for collection, values in ((dynamic, VOCABULARY[at]), (static, at)):
        batch = KeyedJaggedTensor(
            ["v", "u"],
            values,
            lengths=torch.tensor([1, 1, 0, 2, 1]),
            stride_per_key_per_rank=[[2], [3]],
            inverse_indices=inverse,
        )
        results.append(collection(batch).values())
        results[-1].sum().backward()
    torch.testing.assert_close(*results)
    assert results[0].shape == (3, 32)


@pytest.mark.parametrize(("optimizer", "arguments"), OPTIMIZERS)
def test_sequences_train_as_static_ones(optimizer: Any, arguments: dict[str, Any]) -> None:
    dynamic = DynamicEmbeddingCollection(
        [DynamicEmbeddingConfig("user", 8, 128, 1 << 13, ["u", "v"])], optimizer, arguments, need_indices=True
    )
    static = FusedEmbeddingCollection(
        [rs.EmbeddingConfig(1500, 8, "user", feature_names=["u", "v"])], optimizer, arguments
    )
    static.state_dict()["embeddings.user.weight"].copy_(dynamic.table("user").initial(VOCABULARY))
    for by_id, by_position in batches(25):
        mine, other = dynamic(by_id), static(by_position)
        for key in ("u", "v"):
            torch.testing.assert_close(mine[key].values(), other[key].values())
            assert torch.equal(mine[key].weights(), by_id[key].values())
        sum(mine[key].values().pow(2).sum() for key in mine).backward()
        sum(other[key].values().pow(2).sum() for key in other).backward()
    dynamic.eval()
    for by_id, by_position in batches(5, seed=9):
        torch.testing.assert_close(dynamic(by_id)["v"].values(), static(by_position)["v"].values())


def one_id(value: int) -> KeyedJaggedTensor:
    return KeyedJaggedTensor(["user"], torch.tensor([value]), lengths=torch.tensor([1]))


def small(**more: Any) -> DynamicEmbeddingBagCollection:
    """128 rows of ones, optimizer SGD with a learning rate of 1."""
    config = DynamicEmbeddingConfig("user", 4, 128, weight_init_min=1, weight_init_max=1, **more)
    return DynamicEmbeddingBagCollection([config], torch.optim.SGD, {"lr": 1.0})


def filled(collection: DynamicEmbeddingBagCollection, first: int, count: int = 128) -> torch.Tensor:
    """The output of a batch of ``count`` new ids."""
    ids = torch.arange(first, first + count)
    return collection(KeyedJaggedTensor(["user"], ids, lengths=torch.ones(count, dtype=torch.int64))).values()


def test_an_evicted_ids_successor_never_reads_or_gets_what_belonged_to_it() -> None:
    collection = small()
    filled(collection, 0).sum().backward()
    assert collection.eval()(one_id(5)).values().tolist() == [[0.0] * 4]  # trained: 1 - 1
    collection.train()
    assert filled(collection, 1000).unique().tolist() == [1.0]
    assert collection.eval()(one_id(5)).values().tolist() == [[1.0] * 4]  # evicted: initial again
    collection.train()
    assert collection(one_id(5)).values().tolist() == [[1.0] * 4]


def test_ids_whose_backward_is_to_come_keep_their_rows() -> None:
    collection = small()
    first = filled(collection, 0)
    second = filled(collection, 1000)  # no slot is free
    assert collection.counters()["user"]["fast"]["overflows"] == 128
    assert second.unique().tolist() == [1.0]
    second.sum().backward()
    first.sum().backward()
    assert collection.eval()(one_id(5)).values().tolist() == [[0.0] * 4]
    assert collection(one_id(1005)).values().tolist() == [[1.0] * 4]  # absent ids are not trained
    collection.train()
    filled(collection, 1000)
    assert collection.counters()["user"]["fast"]["evictions"] == 128


def test_each_table_pins_its_own_steps() -> None:
    """An operation on one table is a step of that table alone."""
    names = ["item", "user"]
    configs = [DynamicEmbeddingConfig(name, 4, 128, weight_init_min=1, weight_init_max=1) for name in names]
    collection = DynamicEmbeddingBagCollection(configs, torch.optim.SGD, {"lr": 1.0})
    for _ in range(3):
        collection.table("item").find_or_insert(torch.arange(5))
    lengths = torch.ones(2 * 128, dtype=torch.int64)

    def batch(first: int) -> KeyedJaggedTensor:
        return KeyedJaggedTensor(names, torch.arange(first, first + 128).repeat(2), lengths=lengths)

    first = collection(batch(1000)).values()
    collection(batch(2000))
    assert collection.counters()["user"]["fast"]["evictions"] == 0
    first.sum().backward()
    assert collection.eval()(batch(1000))["user"].unique().tolist() == [0.0]


def test_a_batch_that_is_dropped_without_backward_pins_nothing() -> None:
    collection = small()
    dropped = filled(collection, 0)
    del dropped
    gc.collect()
    filled(collection, 1000)
    assert collection.counters()["user"]["fast"]["evictions"] == 128


def test_copies_and_state_dicts_continue_as_the_original() -> None:
    dynamic, _ = bag_pair(torch.optim.Adagrad, {"lr": 0.1})
    data = batches(12)
    for by_id, _ in data[:6]:
        dynamic(by_id).values().pow(2).sum().backward()
    loaded, _ = bag_pair(torch.optim.Adagrad, {"lr": 0.1})
    loaded.load_state_dict(pickle.loads(pickle.dumps(dynamic.state_dict())))
    others = [loaded, copy.deepcopy(dynamic), pickle.loads(pickle.dumps(dynamic))]
    for by_id, _ in data[6:]:
        expected = dynamic(by_id).values()
        expected.pow(2).sum().backward()
        for other in others:
            values = other(by_id).values()
            assert torch.equal(values, expected)
            values.pow(2).sum().backward()
    assert all(other.counters() == dynamic.counters() for other in others)


def test_wrong_names_and_states_are_refused() -> None:
    with pytest.raises(ValueError, match=r"the state has tables \['user'\], and the collection \['user', 'item'\]"):
        bag_pair(torch.optim.SGD, {"lr": 0.1})[0].load_state_dict(small().state_dict())
    with pytest.raises(ValueError, match=r"table 'item' does not exist\. Fix: use one of 'user'"):
        small().table("item")
    with pytest.raises(ValueError, match="feature 'user' of table 'user' is not in the batch"):
        small()(KeyedJaggedTensor(["u"], torch.tensor([1]), lengths=torch.tensor([1])))
