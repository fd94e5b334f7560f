"""Row numbers beyond 32 bits: ids of tables with billions of rows reach their shard unharmed. No weights are made."""

import itertools

import pytest
import torch

from recshard_lab import EmbeddingBagConfig, KeyedJaggedTensor, ParameterSharding, Shard
from recshard_lab.comm import ShardingEnv
from recshard_lab.distributed.sharded_collections import blocks_of
from recshard_lab.distributed.step.input_dist import InputDist
from recshard_lab.distributed.step.layout import Layout

ROWS = 5_000_000_000
FIRST = 2**31


@pytest.mark.parametrize(
    ("cuts", "wire"),
    [
        ([0, ROWS], torch.int64),  # one shard whose own row numbers need 64 bits
        ([0, 2_000_000_000, 4_000_000_000, ROWS], torch.int32),  # row numbers inside each shard fit 32 bits
        ([0, 1_000_000_000, ROWS], torch.int64),  # the second one's do not
        ([0, FIRST - 1, 2 * (FIRST - 1), ROWS], torch.int32),  # the largest that fit
        ([0, FIRST, 2 * FIRST, ROWS], torch.int64),  # one row more
    ],
)
@pytest.mark.parametrize("weighted", [False, True])
def test_ids_beyond_32_bits_are_looked_up_in_their_shard(cuts: list[int], wire: torch.dtype, weighted: bool) -> None:
    table = EmbeddingBagConfig(name="t", num_embeddings=ROWS, embedding_dim=4, feature_names=["f"])
    spans = list(itertools.pairwise(cuts))
    sharding = ParameterSharding("custom", shards=[Shard(0, span, (0, 4)) for span in spans])
    groups = {(0, number): (0,) for number in range(len(spans))}
    layout = Layout([table], blocks_of([table]), {"t": sharding}, groups, 1)
    ids = [ROWS - 1, 0, FIRST, FIRST - 1, 2_500_000_000, 4_000_000_000, 1_999_999_999]
    weights = torch.arange(7.0) if weighted else None
    batch = KeyedJaggedTensor(["f"], torch.tensor(ids), weights, lengths=torch.tensor([3, 4]))
    dist = InputDist(layout, ShardingEnv(1, 0, None), pooled=True, weighted=weighted)
    assert dist.wire is wire
    lookup_input = dist.announce(batch)().wait()
    expected = [(span, [i - span[0] for i in ids if span[0] <= i < span[1]]) for span in spans]
    lanes = [layout.rank_features[0][number].shard.rows for number in range(len(spans))]
    assert lanes == spans
    assert lookup_input.ids.tolist() == [own for _, found in expected for own in found]
    assert int(lookup_input.ids.min()) >= 0
    if weighted:
        order = [n for span in spans for n, i in enumerate(ids) if span[0] <= i < span[1]]
        assert lookup_input.weights is not None
        assert lookup_input.weights.tolist() == order
