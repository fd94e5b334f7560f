"""Memory that plans leave free."""

import pytest
from torch import nn

from recshard_lab import EmbeddingBagCollection, EmbeddingBagConfig, EmbeddingShardingPlanner, PlanError, Topology
from recshard_lab.planner import FixedPercentageStorageReservation, HeuristicalStorageReservation

TABLE = EmbeddingBagConfig(name="t", num_embeddings=1000, embedding_dim=64, feature_names=["f"])  # 256 kB


def planner(reservation: FixedPercentageStorageReservation, cap: int) -> EmbeddingShardingPlanner:
    return EmbeddingShardingPlanner(Topology(1, ddr_cap=cap), batch_size=1, storage_reservation=reservation)


def test_a_share_of_memory_stays_free() -> None:
    module = EmbeddingBagCollection([TABLE], device="meta")
    planner(FixedPercentageStorageReservation(0.0), cap=400_000).plan(module)
    with pytest.raises(PlanError):
        planner(FixedPercentageStorageReservation(0.5), cap=400_000).plan(module)


def test_the_dense_part_of_the_model_is_reserved_for() -> None:
    ebc = EmbeddingBagCollection([TABLE], device="meta")
    model = nn.ModuleDict({"ebc": ebc, "over": nn.Linear(64, 200, bias=False, device="meta")})  # 51 kB, six times
    planner(HeuristicalStorageReservation(0.0), cap=400_000).plan(ebc)
    with pytest.raises(PlanError):
        planner(HeuristicalStorageReservation(0.0), cap=400_000).plan(model)
    planner(HeuristicalStorageReservation(0.0, dense_tensor_estimate=0), cap=400_000).plan(model)


def test_a_plan_is_printed_with_its_estimate_where_that_is_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    planner = EmbeddingShardingPlanner(Topology(2), debug=True)
    plan = planner.plan(EmbeddingBagCollection([TABLE], device="meta"))
    printed = capsys.readouterr().out
    assert plan.show() in printed
    assert str(plan.estimate) in printed


def test_a_share_that_cannot_be_is_refused() -> None:
    for share in (-0.1, 1.0, 15):
        with pytest.raises(ValueError, match="percentage"):
            FixedPercentageStorageReservation(share)
