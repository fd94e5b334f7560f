"""Sharded collections do with ids that are no rows what the unsharded ones do, under every kind of plan."""

import random
from typing import Any

import pytest
import torch

from recshard_lab import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor, ParameterSharding, Shard
from recshard_lab.comm import ShardingEnv
from recshard_lab.distributed import EmbeddingBagCollectionSharder
from tests.distributed import cases
from tests.distributed.jobs import Case
from tests.distributed.test_parity import MIXED, check
from tests.grid import on_ranks

MIXES = [MIXED, ["grid_shard", "table_row_wise", "row_wise"]]
#: a feature that two tables of different sizes read: an id may be a row of one of them alone
SHARED = [*cases.TABLES[:3], {"name": "few", "num_embeddings": 3, "embedding_dim": 8, "feature_names": ["user"]}]


def astray(seed: int, tables: list[dict[str, Any]], steps: list[Any]) -> list[Any]:
    """The steps with some ids moved below and beyond their tables."""
    generator = random.Random(seed)
    rows = {feature: table["num_embeddings"] for table in tables for feature in table["feature_names"]}
    for ranks in steps:
        for bags in ranks:
            for feature, own in bags.items():
                wrong = [-1, -(2**40), rows[feature], rows[feature] + 7, 2**40]
                bags[feature] = [[generator.choice(wrong) if generator.random() < 0.3 else i for i in b] for b in own]
    return steps


@on_ranks(2, 3, kind=["pooled", "weighted", "sequence", "variable"], mix=list(MIXES), policy=["clamp", "ignore"])
def test_ids_that_are_no_rows_change_what_they_change_unsharded(
    ranks: Any, kind: str, mix: list[str], policy: str
) -> None:
    tables = SHARED
    if kind == "sequence":
        tables = [{k: v for k, v in table.items() if k != "pooling"} for table in tables]
    steps = cases.random_steps(11, tables, ranks.world_size, steps=3, samples=5)
    inverse = cases.random_inverses(12, steps) if kind == "variable" else None
    case = Case(
        tables,
        cases.plan_of(tables, mix, ranks.world_size).to_json(),
        astray(13, tables, steps),
        "exact_row_wise_adagrad",
        sequence=kind == "sequence",
        weighted=kind == "weighted",
        out_of_range=policy,
        inverse=inverse,
    )
    results = check(case, ranks)
    counted = sum(
        not 0 <= id_ < table["num_embeddings"]
        for table in tables
        for feature in table["feature_names"]
        for ranks_of_step in steps
        for bags in ranks_of_step
        for bag in bags[feature]
        for id_ in bag
    )
    assert counted > 20
    assert sum(result.out_of_range for result in results) == counted


def sharded(sharder: EmbeddingBagCollectionSharder, policy: str = "error") -> Any:
    table = EmbeddingBagConfig(4, 4, "t", feature_names=["f"])
    plan = {"t": ParameterSharding("table_wise", shards=[Shard(0, (0, 4), (0, 4))])}
    module = EmbeddingBagCollection([table], out_of_range=policy)
    return sharder.shard(module, plan, ShardingEnv(1, 0), torch.device("cpu"))


def batch(*ids: int) -> KeyedJaggedTensor:
    return KeyedJaggedTensor(["f"], torch.tensor(ids), lengths=torch.tensor([1, 0, len(ids) - 1]))


def test_a_refused_id_is_named_with_its_feature_and_sample() -> None:
    with pytest.raises(ValueError, match="feature 'f', sample 2: id 4 is not a row of table 't', which has ids 0 to 3"):
        sharded(EmbeddingBagCollectionSharder())(batch(0, 3, 4))
    floats = KeyedJaggedTensor(["f"], torch.tensor([0.5]), lengths=torch.tensor([1]))
    with pytest.raises(ValueError, match=r"int32 or int64, got .* torch\.float32"):
        sharded(EmbeddingBagCollectionSharder())(floats)


def test_the_sharder_does_as_the_module_unless_told() -> None:
    assert sharded(EmbeddingBagCollectionSharder(), "clamp").out_of_range == "clamp"
    told = sharded(EmbeddingBagCollectionSharder(out_of_range="ignore"), "clamp")
    assert told.out_of_range == "ignore"
    assert not told(batch(9))["f"].any()
    assert told.out_of_range_count() == 1
    assert sharded(EmbeddingBagCollectionSharder({"bounds_check_mode": "FATAL"}), "clamp").out_of_range == "error"


def test_a_policy_that_nobody_knows_or_that_contradicts_is_refused() -> None:
    with pytest.raises(ValueError, match="out_of_range must be one of 'error', 'clamp', 'ignore', got 'wrap'"):
        EmbeddingBagCollectionSharder(out_of_range="wrap")
    with pytest.raises(ValueError, match="bounds_check_mode=WARNING is not supported: it looks up row 0"):
        EmbeddingBagCollectionSharder({"bounds_check_mode": "WARNING"})
    with pytest.raises(ValueError, match="means out_of_range='error', but out_of_range='clamp'"):
        EmbeddingBagCollectionSharder({"bounds_check_mode": "FATAL"}, out_of_range="clamp")
