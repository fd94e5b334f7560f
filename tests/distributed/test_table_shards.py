"""What a rank draws of a table: the same numbers whoever holds which rows."""

from __future__ import annotations

import torch

from recshard_lab.comm import ShardingEnv
from recshard_lab.distributed.state.table import ShardedTable
from recshard_lab.embedding import EmbeddingBagConfig
from recshard_lab.sharding import ParameterSharding, Shard

ROWS, DIM = 20_000, 6


def drawn(rects: list[Shard]) -> torch.Tensor:
    config = EmbeddingBagConfig(name="t", num_embeddings=ROWS, embedding_dim=DIM, feature_names=["f"])
    held = {number: torch.empty(rect.num_rows, rect.num_cols) for number, rect in enumerate(rects)}
    shards = ShardedTable(config, ParameterSharding("custom", shards=rects), held, {}, ShardingEnv.default())
    shards.reset_parameters(seed=5)
    return shards.tiles(shards.parts()[0]).whole(shards.size)


def test_first_weights_do_not_hang_on_where_the_table_is_cut() -> None:
    whole = drawn([Shard(0, (0, ROWS), (0, DIM))])
    bound = 1 / ROWS**0.5
    assert -bound <= float(whole.min()) < float(whole.max()) <= bound
    assert len(whole.unique()) > 0.95 * whole.numel()
    stripes = [Shard(0, rows, (0, DIM)) for rows in ((0, 3), (3, 9_001), (9_001, 16_384), (16_384, ROWS))]
    assert torch.equal(drawn(stripes), whole)
    corners = [Shard(0, rows, cols) for rows in ((0, 8_191), (8_191, ROWS)) for cols in ((0, 4), (4, DIM))]
    assert torch.equal(drawn(corners), whole)
