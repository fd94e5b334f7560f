"""NaN and infinity in tables, per-sample weights and gradients do what they do in the unsharded model."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from recshard_lab import (
    DistributedModelParallel,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    KeyedJaggedTensor,
    PoolingType,
)
from recshard_lab.distributed import EmbeddingBagCollectionSharder, EmbeddingCollectionSharder
from recshard_lab.embedding.kernels import available
from recshard_lab.optim import RowWiseAdagrad
from recshard_lab.sharding.schemes import scheme_names
from tests.distributed import cases

NAN, INF = torch.nan, torch.inf
KINDS, SCHEMES = ["pooled", "weighted", "sequence"], [*scheme_names(), "custom"]
PLACES = ["tables", "weights", "gradients"]
OPTIMIZERS: dict[str, Any] = {
    "exact_sgd": lambda tables: torch.optim.SGD(tables, lr=0.1),
    "exact_adagrad": lambda tables: torch.optim.Adagrad(tables, lr=0.1, eps=1e-3),
    "exact_row_wise_adagrad": lambda tables: RowWiseAdagrad(tables, lr=0.1, eps=1e-3),
}


def collection(kind: str, place: str) -> Any:
    config: Any = EmbeddingConfig if kind == "sequence" else EmbeddingBagConfig
    tables = [config(12, 8, f"t{key}", feature_names=[key]) for key in "ab"]
    if kind == "pooled":
        tables[1].pooling = PoolingType.MEAN
    made: Any = (
        EmbeddingCollection(tables) if kind == "sequence" else EmbeddingBagCollection(tables, kind == "weighted")
    )
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in made.parameters():
            nn.init.uniform_(parameter, -1, 1, generator=generator)
            if place == "tables":
                parameter[2, 1], parameter[5, 6], parameter[9], parameter[10, 0] = NAN, INF, -INF, INF
    return made


def batch(rank: int, kind: str, place: str) -> KeyedJaggedTensor:
    """Rows with and without such numbers in one bag, bags without ids, a sum of infinities of both signs."""
    values = torch.tensor([2, 5, 9, 0, 10, 11, 9, 10, 1, 4, 5, 3, 3]) if rank == 0 else torch.tensor([7, 2, 6, 6, 5])
    lengths = torch.tensor([2, 2, 0, 4, 0, 3, 1, 1]) if rank == 0 else torch.tensor([1, 0, 2, 2])
    weights = torch.arange(1.0, values.numel() + 1) / 8
    if place == "weights":
        weights[0], weights[2], weights[-1] = (NAN, INF, -INF) if rank == 0 else (0.0, NAN, INF)
    return KeyedJaggedTensor(["a", "b"], values, weights if kind == "weighted" else None, lengths=lengths)


def flat(out: Any) -> Tensor:
    return torch.cat([own.values().reshape(-1) for own in out.values()]) if isinstance(out, dict) else out.values()


def factors(rows: Tensor, place: str) -> Tensor:
    """What rows are multiplied by for the loss: their gradient."""
    made = torch.linspace(-1, 1, rows.numel()).view_as(rows).clone()
    if place == "gradients":
        made.view(-1)[1::29], made.view(-1)[3::37], made.view(-1)[4::41] = NAN, INF, -INF
    return made


def unsharded(kind: str, place: str, optimizer: str) -> tuple[list[Tensor], list[Tensor]]:
    model = collection(kind, place)
    step = OPTIMIZERS[optimizer](list(model.parameters()))
    outputs = []
    for rank in range(2):
        rows = flat(model(batch(rank, kind, place)))
        (rows * factors(rows, place) / 2).sum().backward()
        outputs.append(rows.detach())
    step.step()
    return outputs, [own.detach().clone() for own in model.parameters()]


def sharded(kind: str, place: str, optimizer: str, scheme: str) -> tuple[Tensor, list[Tensor]]:
    """The same on two ranks. Runs on every rank."""
    model = collection(kind, place)
    tables = model.embedding_configs() if kind == "sequence" else model.embedding_bag_configs()
    sharder = EmbeddingCollectionSharder if kind == "sequence" else EmbeddingBagCollectionSharder
    fused = {"optimizer": optimizer, "learning_rate": 0.1, "eps": 1e-3}
    plan = cases.root_plan(tables, scheme, 2)
    dmp = DistributedModelParallel(model, plan=plan, sharders=[sharder(fused, backend=backend_of(optimizer, scheme))])
    rows = flat(dmp(batch(torch.distributed.get_rank(), kind, place)))
    (rows * factors(rows, place)).sum().backward()
    return rows.detach(), list(dmp.full_state_dict().values())


def backend_of(optimizer: str, scheme: str) -> str | None:
    """Kernels take turns, where they have the optimizer. fbgemm's row-wise Adagrad refuses columns."""
    whole_rows = scheme in ("table_wise", "row_wise", "data_parallel")
    if optimizer == "exact_adagrad" or (optimizer == "exact_row_wise_adagrad" and not whole_rows):
        return None
    return available()[SCHEMES.index(scheme) % len(available())]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize(
    ("kind", "place"),
    [(kind, place) for kind in KINDS for place in PLACES if place != "weights" or kind == "weighted"],
)
def test_every_scheme_treats_them_as_the_unsharded_model(two: Any, kind: str, place: str, optimizer: str) -> None:
    outputs, weights = unsharded(kind, place, optimizer)
    assert any(not own.isfinite().all() for own in [*outputs, *weights])
    for scheme in SCHEMES:
        for rank, (rows, trained) in enumerate(two.run(sharded, kind, place, optimizer, scheme)):
            torch.testing.assert_close(rows, outputs[rank], equal_nan=True, msg=lambda m, s=scheme: f"{s} rows: {m}")
            for own, expected in zip(trained, weights, strict=True):
                torch.testing.assert_close(own, expected, equal_nan=True, msg=lambda m, s=scheme: f"{s} table: {m}")
