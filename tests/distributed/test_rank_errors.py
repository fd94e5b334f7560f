"""A mistake on one rank: named, and the others are free again."""

import pytest
import torch

import recshard_lab
from recshard_lab import (
    DistributedModelParallel,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingModuleShardingPlan,
    ParameterSharding,
    RankError,
    ShardingPlan,
)
from tests.distributed.jobs import batch_of

ONE = [EmbeddingBagConfig(name="t", num_embeddings=10, embedding_dim=4, feature_names=["f"])]


def bad_id_on_rank_1() -> None:
    plan = ShardingPlan({"": EmbeddingModuleShardingPlan(t=ParameterSharding("row_wise"))})
    dmp = DistributedModelParallel(EmbeddingBagCollection(tables=ONE), plan=plan)
    dmp(batch_of({"f": [[10 if torch.distributed.get_rank() == 1 else 0]]}))


def test_an_id_out_of_range_on_one_rank_frees_the_others_and_is_named() -> None:
    with recshard_lab.launch(2) as launched:
        with pytest.raises(RankError, match=r"(?s)rank 1.*feature 'f', sample 0: id 10 is not a row"):
            launched.run(bad_id_on_rank_1)
        assert launched.run(torch.distributed.get_rank) == [0, 1]
