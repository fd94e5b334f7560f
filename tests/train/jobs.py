"""What ranks run in the tests of the loop."""

import torch
from torch import Tensor, nn

from recshard_lab.data import RatingsDataset
from recshard_lab.embedding import EmbeddingBagCollection
from recshard_lab.models import DLRM
from recshard_lab.train import Recipe, evaluate, train_epochs

RECIPE = Recipe(embedding_dim=12, over_arch_layer_sizes=(8, 1), batch_size=21, epochs=2, init_max=0.3)

Run = tuple[list[float], dict[str, Tensor], Tensor, float]


def plain_model(dataset: RatingsDataset) -> DLRM:
    """A model of which every parameter waits for an ordinary optimizer."""
    torch.manual_seed(5)
    return DLRM(EmbeddingBagCollection(RECIPE.tables(dataset)), 0, [], (8, 1))


def train_plain(model: nn.Module, dataset: RatingsDataset) -> Run:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    result = train_epochs(model, dataset, optimizer, epochs=2, batch_size=21, seed=4)
    scored = evaluate(model, dataset, batch_size=37)
    weights = {name.removeprefix("module."): p.detach().clone() for name, p in model.named_parameters()}
    return result.losses, weights, scored.scores, scored.auc


def replicated(dataset: RatingsDataset) -> Run:
    """Data parallel by torch itself: no sharding of ours takes part."""
    return train_plain(nn.parallel.DistributedDataParallel(plain_model(dataset)), dataset)


def sharded(dataset: RatingsDataset, recipe: Recipe, scheme: str, backend: str | None = None) -> Run:
    """The recipe on DistributedModelParallel under one scheme for all tables."""
    import recshard_lab as rl

    world_size = torch.distributed.get_world_size()
    schemes = {
        "table_wise": lambda: rl.table_wise(rank=world_size - 1),
        "row_wise": rl.row_wise,
        "column_wise": lambda: rl.column_wise(ranks=list(range(world_size))),
        "data_parallel": rl.data_parallel,
    }
    model = recipe.model(dataset)
    collection = model.embedding_bag_collection
    per_table = {table.name: schemes[scheme]() for table in collection.embedding_bag_configs()}
    module_plan = rl.construct_module_sharding_plan(collection, per_table, world_size=world_size, device_type="cpu")
    plan = rl.ShardingPlan({"embedding_bag_collection": module_plan})
    sharders = [rl.EmbeddingBagCollectionSharder(backend=backend)]
    dmp = rl.DistributedModelParallel(model, plan=plan, sharders=sharders)
    result = recipe.train(dmp, dataset)
    scored = evaluate(dmp, dataset)
    return result.losses, dmp.full_state_dict(), scored.scores, scored.auc


def unsharded(dataset: RatingsDataset, recipe: Recipe) -> Run:
    model = recipe.model(dataset)
    result = recipe.train(model, dataset)
    scored = evaluate(model, dataset)
    return result.losses, model.state_dict(), scored.scores, scored.auc
