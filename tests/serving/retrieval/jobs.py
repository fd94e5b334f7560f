"""What ranks run in tests of retrieval."""

import torch
import torch.distributed as dist

from recshard_lab.distributed import DistributedModelParallel
from recshard_lab.embedding import EmbeddingBagCollection, EmbeddingBagConfig
from recshard_lab.models import TwoTower
from recshard_lab.serving.retrieval import ItemFeatures, encode_items
from recshard_lab.sharding import ShardingPlan
from recshard_lab.sparse import JaggedTensor

ITEMS = 37


def two_tower() -> TwoTower:
    """Two towers of drawn weights: users by id, movies by id and genres."""
    torch.manual_seed(0)
    sizes = {"users": (10, 4, "user"), "movies": (ITEMS, 4, "movie"), "genres": (5, 4, "genre")}
    tables = [EmbeddingBagConfig(rows, dim, name, feature_names=[key]) for name, (rows, dim, key) in sizes.items()]
    model = TwoTower(EmbeddingBagCollection(tables), [6, 3])
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(torch.randn(weight.shape, generator=torch.Generator().manual_seed(weight.numel())))
    return model


def items(start: int = 0, end: int = ITEMS) -> ItemFeatures:
    """Movies 1000 + n with their number and 0 to 2 genres."""
    numbers = torch.arange(start, end)
    bags = [[n % 5, (n + 2) % 5][: n % 3] for n in numbers.tolist()]
    genres = JaggedTensor(
        torch.tensor([own for bag in bags for own in bag], dtype=torch.int64),
        lengths=torch.tensor(list(map(len, bags))),
    )
    movie = JaggedTensor(numbers, lengths=torch.ones(len(numbers), dtype=torch.int64))
    return ItemFeatures(1000 + numbers, {"movie": movie, "genre": genres})


def encode_own_items(plan: str) -> torch.Tensor:
    """On a rank: vectors of this rank's half of the items, by the sharded model."""
    dmp = DistributedModelParallel(two_tower(), plan=ShardingPlan.from_json(plan))
    bounds = [0, ITEMS // 2, ITEMS]
    own = items(*bounds[dist.get_rank() :][:2])
    return encode_items(dmp.module, own, batch_size=10)
