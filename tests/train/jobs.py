"""What ranks run in the tests of the loop."""

import torch
from torch import Tensor, nn

from recshard_lab.data import RatingsDataset
from recshard_lab.embedding import EmbeddingBagCollection
from recshard_lab.models import DLRM
from recshard_lab.train import Recipe, evaluate, train_epochs
from recshard_lab.train.metrics import NEMetric, SessionMetricDef

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
    module_plan = rl.sharding.construct_module_sharding_plan(
        collection, per_table, world_size=world_size, device_type="cpu"
    )
    plan = rl.ShardingPlan({"embedding_bag_collection": module_plan})
    sharders = [rl.distributed.EmbeddingBagCollectionSharder(backend=backend)]
    dmp = rl.DistributedModelParallel(model, plan=plan, sharders=sharders)
    result = recipe.train(dmp, dataset)
    scored = evaluate(dmp, dataset)
    return result.losses, dmp.full_state_dict(), scored.scores, scored.auc


def unsharded(dataset: RatingsDataset, recipe: Recipe) -> Run:
    model = recipe.model(dataset)
    result = recipe.train(model, dataset)
    scored = evaluate(model, dataset)
    return result.losses, model.state_dict(), scored.scores, scored.auc


Step = dict[str, Tensor]
"""Predictions, labels, weights and groups of one rank's samples."""


def rank_steps(seed: int, world_size: int, steps: int) -> list[list[Step]]:
    """Step -> rank -> samples: ranks with many, few and none, equal scores, groups that lie on several ranks."""
    draw = torch.Generator().manual_seed(seed)
    sizes = [
        [(5 * step + 7 * rank) % 13 * ((step + rank) % 4 != 3) for rank in range(world_size)] for step in range(steps)
    ]
    return [[_samples(size, draw) for size in own] for own in sizes]


def _samples(size: int, draw: torch.Generator) -> Step:
    return {
        "predictions": torch.randint(1, 20, (size,), generator=draw) / 20,
        "labels": torch.randint(2, (size,), generator=draw).float(),
        "weights": torch.rand(size, generator=draw, dtype=torch.float64),
        "groups": torch.randint(-2, 5, (size,), generator=draw),
    }


def whole(steps: list[list[Step]]) -> Step:
    """All samples of some steps."""
    return {name: torch.cat([own[name] for step in steps for own in step]) for name in steps[0][0]}


def measured(steps: list[list[Step]], window_size: int, state: object = None) -> tuple[dict[str, float], object]:
    """On a rank: every metric's values after these steps, and their state."""
    from recshard_lab.train.metrics import module as metric_module

    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    world_size = len(steps[0])
    task = metric_module.RecTaskInfo(session_metric_def=SessionMetricDef("user", 2))
    config = metric_module.MetricsConfig(
        rec_tasks=[task],
        rec_metrics={
            kind: metric_module.RecMetricDef(window_size=window_size)
            for kind in metric_module.METRICS
            if kind.name not in ("SEGMENTED_NE", "MULTICLASS_RECALL", "MULTI_LABEL_PRECISION")  # of other inputs
        },
    )
    metrics = metric_module.generate_metric_module(
        metric_module.RecMetricModule, config, batch_size=1, world_size=world_size, my_rank=rank
    )
    if state is not None:
        metrics.load_state_dict(state)  # type: ignore[arg-type]
    for step in steps:
        own = step[rank]
        named = {"prediction": "predictions", "label": "labels", "weight": "weights", "user": "groups"}
        metrics.update({name: own[column] for name, column in named.items()})
    values = {name.partition("|")[2]: float(value) for name, value in metrics.compute().items()}
    return values, metrics.state_dict()


def uneven_updates() -> str:
    metric = NEMetric(torch.distributed.get_world_size(), torch.distributed.get_rank())
    one = torch.ones(1)
    for _ in range(1 + torch.distributed.get_rank()):
        metric.update(predictions=one / 2, labels=one)
    try:
        metric.compute()
    except ValueError as error:
        return str(error)
    return "computed"
