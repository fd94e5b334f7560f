"""Separate modules beside one fused collection: the counts behind the lesson of notebook 03."""

import numpy as np
import pytest
import torch

import recshard_lab as rs
from recshard_lab.lab import LookupComparison, compare_lookups, random_batch

SEPARATE, FUSED = "one module per table", "one fused collection"


def compare(tables: int, samples: int) -> LookupComparison:
    configs = [
        rs.EmbeddingBagConfig(name=f"t{i}", num_embeddings=50, embedding_dim=8, feature_names=[f"f{i}"])
        for i in range(tables)
    ]
    lengths = torch.full((tables * samples,), 2)
    ids = torch.randint(0, 50, (int(lengths.sum()),))
    return compare_lookups(configs, rs.KeyedJaggedTensor([f"f{i}" for i in range(tables)], ids, lengths=lengths), 1)


def test_operators_of_separate_modules_grow_with_tables_and_those_of_a_fused_collection_do_not() -> None:
    few, many = compare(4, 8), compare(8, 8)
    for phase in ("forward", "backward", "optimizer"):
        assert many.operators[SEPARATE][phase] > 1.7 * few.operators[SEPARATE][phase]
        assert many.operators[FUSED][phase] == few.operators[FUSED][phase]
    assert many.operators[FUSED]["optimizer"] == 0  # it steps inside backward
    assert sum(many.operators[SEPARATE].values()) > 5 * sum(many.operators[FUSED].values())


def test_operators_do_not_grow_with_the_batch_and_gradient_bytes_do() -> None:
    """So calls are a fixed price of a step, and the rows of the sparse gradient a price per id."""
    small, large = compare(4, 8), compare(4, 80)
    assert large.operators == small.operators
    ids = 4 * 8 * 2
    assert small.gradient_bytes == ids * (8 + 8 * 4)  # an id of 8 bytes, and a row of 8 fp32 numbers
    assert large.gradient_bytes == 10 * small.gradient_bytes


def test_wrong_arguments_are_named() -> None:
    shared = rs.EmbeddingBagConfig(name="t", num_embeddings=5, embedding_dim=4, feature_names=["f", "g"])
    batch = rs.KeyedJaggedTensor(["f", "g"], torch.tensor([1, 2]), lengths=torch.tensor([1, 1]))
    with pytest.raises(ValueError, match="table 't' has several features"):
        compare_lookups([shared], batch)
    with pytest.raises(ValueError, match="repeats is 0"):
        compare_lookups([], batch, repeats=0)


def test_a_random_batch_is_the_same_at_every_call_unless_a_source_is_passed() -> None:
    table = rs.EmbeddingBagConfig(name="t", num_embeddings=1000, embedding_dim=4, feature_names=["f"])
    load = rs.Workload(16, 2.0)
    one, same, other = (random_batch([table], load, *rng) for rng in ([], [], [np.random.default_rng(1)]))
    assert one["f"].lengths().tolist() == [2] * 16
    assert torch.equal(one["f"].values(), same["f"].values())
    assert not torch.equal(one["f"].values(), other["f"].values())
