"""Out-of-range ids raise, are clamped to the nearest row or are dropped, by policy, and are counted."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import recshard_lab as rs
from recshard_lab.embedding.inputs import policy_of_bounds_check_mode
from recshard_lab.sparse import KeyedJaggedTensor
from tests.embedding.tables import MEAN, SUM

ROWS = {"big": 6, "small": 3}  # one feature reads both: an id may be a row of one alone
BAGS = st.lists(st.lists(st.integers(-2, 8), max_size=4), min_size=1, max_size=4)


def tables(pooling: rs.PoolingType) -> list[rs.EmbeddingBagConfig]:
    return [rs.EmbeddingBagConfig(rows, 4, name, feature_names=["f"], pooling=pooling) for name, rows in ROWS.items()]


def batch(bags: list[list[int]], weighted: bool = False) -> KeyedJaggedTensor:
    ids = [id_ for bag in bags for id_ in bag]
    weights = torch.arange(1.0, len(ids) + 1) if weighted else None
    return KeyedJaggedTensor(["f"], torch.tensor(ids, dtype=torch.int64), weights, torch.tensor([len(b) for b in bags]))


def truth(weight: torch.Tensor, bags: list[list[int]], policy: str, mean: bool, weighted: bool) -> torch.Tensor:
    """Row by row."""
    result, place = [], 0
    for bag in bags:
        total = 0 * weight[0]  # zeros that hang on the table
        for id_ in bag:
            place += 1
            if policy == "ignore" and not 0 <= id_ < weight.shape[0]:
                continue
            row = weight[min(max(id_, 0), weight.shape[0] - 1)]
            total = total + row * (place if weighted else 1)
        result.append(total / max(len(bag), 1) if mean else total)
    return torch.stack(result)


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("pooling", [SUM, MEAN])
@pytest.mark.parametrize("policy", ["clamp", "ignore"])
@given(bags=BAGS)
@settings(max_examples=25, deadline=None)
def test_pooled_outputs_and_gradients_are_those_of_the_rows_that_count(
    policy: str, pooling: rs.PoolingType, weighted: bool, bags: list[list[int]]
) -> None:
    collection = rs.EmbeddingBagCollection(tables(pooling), is_weighted=weighted, out_of_range=policy)
    output = collection(batch(bags, weighted))
    weights = {name: bag.weight for name, bag in collection.embedding_bags.items()}
    for name, weight in weights.items():
        wanted = truth(weight, bags, policy, pooling is MEAN, weighted)
        torch.testing.assert_close(output[f"f@{name}"], wanted)
        mixing = torch.randn_like(wanted)
        got, expected = (
            torch.autograd.grad((out * mixing).sum(), weight, retain_graph=True)
            for out in (output[f"f@{name}"], wanted)
        )
        torch.testing.assert_close(got, expected)
    assert collection.out_of_range_count() == sum(not 0 <= i < n for n in ROWS.values() for bag in bags for i in bag)


@pytest.mark.parametrize("policy", ["clamp", "ignore"])
@given(bags=BAGS)
@settings(max_examples=25, deadline=None)
def test_sequences_keep_a_row_for_every_id(policy: str, bags: list[list[int]]) -> None:
    configs = [rs.EmbeddingConfig(rows, 4, name, feature_names=["f"]) for name, rows in ROWS.items()]
    collection = rs.EmbeddingCollection(configs, need_indices=True, out_of_range=policy)
    ids = [id_ for bag in bags for id_ in bag]
    for name, rows in ROWS.items():
        output = collection(batch(bags))[f"f@{name}"]
        weight = collection.embeddings[name].weight
        assert output.lengths().tolist() == [len(bag) for bag in bags]
        assert output.weights().tolist() == ids
        for row, id_ in zip(output.values(), ids, strict=True):
            if policy == "ignore" and not 0 <= id_ < rows:
                assert not row.any()
            else:
                assert torch.equal(row, weight[min(max(id_, 0), rows - 1)])


def test_another_policy_is_refused() -> None:
    with pytest.raises(ValueError, match="out_of_range must be one of 'error', 'clamp', 'ignore', got 'wrap'"):
        rs.EmbeddingBagCollection(tables(SUM), out_of_range="wrap")


@pytest.mark.parametrize(
    ("mode", "message"),
    [
        ("WARNING", "that row. Fix: use out_of_range='clamp'"),
        ("IGNORE", "it looks up row 0 for an out-of-range id"),
        ("V2_IGNORE", "it looks up row 0 for an out-of-range id"),
        ("NONE", "bounds_check_mode=NONE is not supported"),
        ("LOUD", "bounds_check_mode 'LOUD' is not a member of fbgemm's BoundsCheckMode"),
    ],
)
def test_fbgemms_modes_that_would_do_something_else_are_refused_by_name(mode: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        policy_of_bounds_check_mode(mode)


def test_fbgemms_fatal_is_error_by_name_and_by_member() -> None:
    common = pytest.importorskip("fbgemm_gpu.split_table_batched_embeddings_ops_common")
    assert policy_of_bounds_check_mode("FATAL") == "error"
    for member in common.BoundsCheckMode:
        if "FATAL" in member.name:
            assert policy_of_bounds_check_mode(member) == "error"
        else:
            with pytest.raises(ValueError, match="bounds_check_mode="):
                policy_of_bounds_check_mode(member)
