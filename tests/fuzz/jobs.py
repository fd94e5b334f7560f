"""A case on the ranks."""

import warnings

import torch
from torch import nn

from recshard_lab import DistributedModelParallel, EmbeddingBagCollection, EmbeddingCollection, ShardingPlan
from recshard_lab.comm import CommType, QCommsConfig, get_qcomm_codecs_registry
from recshard_lab.distributed import EmbeddingBagCollectionSharder, EmbeddingCollectionSharder
from tests.fuzz.batches import CURVE, bags, batch, mixing, start_weights
from tests.fuzz.cases import Case
from tests.fuzz.reference import Numbers


def live(case: Case) -> tuple[Numbers, dict[str, str]]:
    """Two steps under each plan, all numbers, and the kernels that served. Runs on every rank."""
    warnings.filterwarnings("ignore", "Please use DTensor")  # torch warns about its ShardedTensor
    dmp, found = _sharded(case), Numbers()
    kernels: dict[str, str] = {}
    optimizers: list[torch.optim.Optimizer] = []
    if any(own.compute_kernel == "dense" for own in ShardingPlan.from_json(case.plans[0]).tables().values()):
        parameters = dmp.dense_parameters() or [nn.Parameter(torch.zeros(1))]
        optimizers = [torch.optim.SGD(parameters, lr=0.05)]
    for step in range(len(case.sizes)):
        if step and step % 2 == 0:
            plan = ShardingPlan.from_json(case.plans[step // 2])
            dmp.reshard(plan, max_extra_bytes=case.bound, optimizers=optimizers or None)
        kernels |= {f"{name} in step {step}": kernel for name, kernel in dmp.backends().items()}
        _step(case, step, dmp, optimizers, found)
    found.weights = {name.split(".")[-2]: value.clone() for name, value in dmp.full_state_dict().items()}
    return found, kernels


def _sharded(case: Case) -> DistributedModelParallel:
    if case.sequence:
        collection: nn.Module = EmbeddingCollection(case.configs())
    else:
        collection = EmbeddingBagCollection(case.configs(), is_weighted=case.weighted)
    if torch.distributed.get_rank() == 0:  # whose weights the others take
        with torch.no_grad():
            for parameter, weight in zip(collection.parameters(), start_weights(case), strict=True):
                parameter.copy_(weight)
    coded = any(kind is not CommType.FP32 for kind in case.codecs)
    registry = get_qcomm_codecs_registry(QCommsConfig(*case.codecs)) if coded else None
    sharder = EmbeddingCollectionSharder if case.sequence else EmbeddingBagCollectionSharder
    plan = ShardingPlan.from_json(case.plans[0])
    return DistributedModelParallel(
        collection, plan=plan, sharders=[sharder(case.fused, registry, backend=case.backend)]
    )


def _step(
    case: Case, step: int, dmp: DistributedModelParallel, optimizers: list[torch.optim.Optimizer], found: Numbers
) -> None:
    rank, world = torch.distributed.get_rank(), case.world
    sent, weights = batch(case, step, rank)
    out = dmp(sent)
    for optimizer in optimizers:
        optimizer.zero_grad()
    rows = {key: own.values() for key, own in out.items()} if case.sequence else out.to_dict()
    names = [(table["name"], feature) for table in case.tables for feature in table["feature_names"]]
    loss = torch.zeros((), dtype=torch.float64)
    found.outputs.append({})
    for number, ((table, feature), own) in enumerate(zip(names, rows.values(), strict=True)):
        counts = [_rows_of(case, step, other, feature) for other in range(world)]
        first = sum(counts[:rank])
        mix = mixing(case, step, number, sum(counts), own.shape[1])[first : first + counts[rank]]
        wide = own.double()
        loss = loss + (wide * (mix + CURVE * wide.detach())).sum()
        found.outputs[-1][f"{table} {feature}"] = own.detach().clone()
    (loss * world).backward()  # gradients are averaged over ranks
    for optimizer in optimizers:
        optimizer.step()
    if weights is not None:
        grad = torch.zeros_like(weights) if weights.grad is None else weights.grad
        names_sent = sent.keys()
        sizes = [bags(case, step, rank, name).ids.numel() for name in names_sent]
        for name, own in zip(names_sent, grad.split(sizes), strict=True):
            found.gradients[step, rank, name] = own / world


def _rows_of(case: Case, step: int, rank: int, feature: str) -> int:
    return bags(case, step, rank, feature).ids.numel() if case.sequence else case.sizes[step][rank]
