"""The whole step on a device equals the step on the CPU: every scheme, route and kind of batch."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from recshard_lab import ShardingPlan
from recshard_lab.comm import CommType, QCommsConfig, get_qcomm_codecs_registry
from recshard_lab.sharding import ROUTES, EmbeddingModuleShardingPlan
from recshard_lab.sharding.plan.types import DISTINCT_ROWS
from recshard_lab.sharding.schemes import scheme_names
from tests.distributed import cases
from tests.distributed.jobs import Case, Result
from tests.ledger import jobs
from tests.ledger.conftest import skip_without_fbgemm

FLAT = ["table_wise", "row_wise", "column_wise", "data_parallel"]
SPLIT = [table for table in cases.TABLES if table["num_embeddings"] > 3]


def case_of(world: int, schemes: list[str], **more: Any) -> Case:
    """Tables dealt to schemes in turn; two steps."""
    tables = more.pop("tables", cases.TABLES)
    kernel = more.pop("kernel", "fused")
    steps = cases.random_steps(5, tables, world, steps=2, samples=6)
    plan = cases.plan_of(tables, schemes, world, kernel).to_json()
    return Case(tables, plan, steps, find_unused=False, **more)


def same(one: Result, other: Result, device: str) -> None:
    """Outputs, losses, gradients and weights. The ledger computes on the CPU: there every bit is equal."""
    exact = device == "ledger"
    tolerance: Any = {"rtol": 0.0 if exact else 1e-5, "atol": 0.0 if exact else 1e-6, "equal_nan": True}
    assert one.keys == other.keys
    assert one.losses == pytest.approx(other.losses, rel=tolerance["rtol"], abs=0.0, nan_ok=True)
    torch.testing.assert_close(one.outputs, other.outputs, **tolerance)
    torch.testing.assert_close(one.dense_grads, other.dense_grads, **tolerance)
    torch.testing.assert_close(one.weights, other.weights, **tolerance)


def check(ranks: Any, case: Case, device: str) -> list[Result]:
    """The results of the ranks on the device."""
    results = ranks.run(jobs.beside_cpu, case, device)
    for one, other in results:
        same(one, other, device)
    return [one for one, _ in results]


@pytest.mark.parametrize("scheme", scheme_names())
def test_every_scheme(ranks: Any, device: str, scheme: str) -> None:
    (first, *_) = check(ranks, case_of(ranks.world_size, [scheme]), device)
    if device == "ledger":
        assert set(first.backends.values()) == {"ledger"}


def test_all_schemes_in_one_plan_with_row_wise_adagrad(ranks: Any, device: str) -> None:
    check(ranks, case_of(ranks.world_size, list(scheme_names()), optimizer="exact_row_wise_adagrad"), device)
    check(ranks, case_of(ranks.world_size, FLAT[::-1], optimizer="exact_row_wise_adagrad"), device)


def test_sequences(ranks: Any, device: str) -> None:
    for schemes in (list(scheme_names()), FLAT, ["row_wise"]):
        for dedup in (False, True):
            tables = cases.sequence_tables()
            check(ranks, case_of(ranks.world_size, schemes, tables=tables, sequence=True, dedup=dedup), device)


@pytest.mark.parametrize("route", [*ROUTES, DISTINCT_ROWS])
def test_every_route(ranks: Any, device: str, route: str) -> None:
    plan = cases.plan_of(SPLIT, ["row_wise"], ranks.world_size)
    entries = {name: replace(entry, route=route) for name, entry in plan.tables().items()}
    text = ShardingPlan({cases.PATH: EmbeddingModuleShardingPlan(entries)}).to_json()
    case = case_of(ranks.world_size, ["row_wise"], tables=SPLIT)
    check(ranks, replace(case, plan=text), device)


@pytest.mark.parametrize("sequence", [False, True])
def test_steps_clipped_by_norm(ranks: Any, device: str, sequence: bool) -> None:
    tables = cases.sequence_tables() if sequence else cases.TABLES
    case = case_of(ranks.world_size, FLAT, tables=tables, sequence=sequence)
    for batches in (1, 2):
        for weights, norms in ranks.run(jobs.clipped, case, device, batches):
            torch.testing.assert_close(*norms)
            assert float(norms[0]) > 0.1
            for name, value in weights[1].items():
                torch.testing.assert_close(weights[0][name], value, rtol=1e-5, atol=1e-6, msg=name)


def test_weighted_batches(ranks: Any, device: str) -> None:
    check(ranks, case_of(ranks.world_size, FLAT, weighted=True), device)


def test_variable_batches(ranks: Any, device: str) -> None:
    case = case_of(ranks.world_size, FLAT)
    check(ranks, replace(case, inverse=cases.random_inverses(7, case.steps)), device)
    case = case_of(ranks.world_size, ["data_parallel"])
    check(ranks, replace(case, inverse=cases.random_inverses(8, case.steps)), device)


@pytest.mark.parametrize("policy", ["clamp", "ignore"])
def test_ids_that_are_no_rows(ranks: Any, device: str, policy: str) -> None:
    case = case_of(ranks.world_size, FLAT, out_of_range=policy)
    for each in case.steps:
        for bags in each:
            for own in bags.values():
                own[0] = [10_000, *own[0]] if own else []
    check(ranks, case, device)


@pytest.mark.parametrize("precision", [CommType.FP16, CommType.INT8])
def test_codecs(ranks: Any, device: str, precision: CommType) -> None:
    codecs = get_qcomm_codecs_registry(QCommsConfig(forward_precision=precision, backward_precision=CommType.BF16))
    check(ranks, case_of(ranks.world_size, FLAT, codecs=codecs), device)


def test_tables_in_host_memory(ranks: Any, device: str) -> None:
    case = case_of(ranks.world_size, FLAT)
    plan = ShardingPlan.from_json(case.plan)
    entries = {
        name: replace(entry, shards=[replace(shard, tier="ddr") for shard in entry.shards]) if number % 2 else entry
        for number, (name, entry) in enumerate(plan.tables().items())
    }
    text = ShardingPlan({cases.PATH: EmbeddingModuleShardingPlan(entries)}).to_json()
    check(ranks, replace(case, plan=text), device)


def test_a_table_in_host_memory_is_never_whole_on_the_device(ranks: Any, device: str) -> None:
    table = {"name": "big", "num_embeddings": 400_000, "embedding_dim": 16, "feature_names": ["a"]}  # 25.6 MB
    entry = cases.plan_of([table], ["table_wise"], 1).tables()["big"]
    kept, peaks = {}, {}
    for tier in ("hbm", "ddr"):
        placed = replace(entry, shards=[replace(shard, tier=tier) for shard in entry.shards])
        plan = ShardingPlan({cases.PATH: EmbeddingModuleShardingPlan({"big": placed})}).to_json()
        kept[tier], peaks[tier] = ranks.run(jobs.built_bytes, Case([table], plan, [], find_unused=False), device)[0]
    assert kept["hbm"] >= 25_600_000 > 100_000 > kept["ddr"]
    assert peaks["ddr"] < 20_000_000  # messages of 8 MiB each way


def test_the_dense_kernel(ranks: Any, device: str) -> None:
    check(ranks, case_of(ranks.world_size, FLAT, kernel="dense"), device)


@pytest.mark.parametrize("optimizer", ["exact_sgd", "exact_row_wise_adagrad"])
@pytest.mark.parametrize("kernel", ["native", "fbgemm"])
def test_the_librarys_own_kernels_on_the_device(ranks: Any, device: str, kernel: str, optimizer: str) -> None:
    if (device, kernel) == ("cuda", "fbgemm"):
        skip_without_fbgemm()
    backend = f"ledger_{kernel}" if (device, kernel) == ("ledger", "fbgemm") else kernel
    flat = FLAT if kernel == "native" else ["table_wise", "row_wise", "data_parallel"]
    for sequence in (False, True):
        tables = cases.sequence_tables() if sequence else cases.TABLES
        more: Any = {"sequence": sequence, "weighted": not sequence, "backend": backend, "optimizer": optimizer}
        case = case_of(ranks.world_size, flat, tables=tables, **more)
        for one, other in ranks.run(jobs.beside_cpu, case, device):
            torch.testing.assert_close(one.weights, other.weights, rtol=1e-5, atol=1e-6)
            torch.testing.assert_close(one.outputs, other.outputs, rtol=1e-5, atol=1e-6)


def test_shards_that_share_some_rows_exchange_row_norms_on_the_device(ranks: Any, device: str) -> None:
    """The native kernel pads the touched rows of a shard on a device; shards of other rows have other padding."""
    table = {"name": "t", "num_embeddings": 24, "embedding_dim": 16, "feature_names": ["a", "b"]}
    sharding = cases.pinwheel(table, ranks.world_size)
    plan = ShardingPlan({cases.PATH: EmbeddingModuleShardingPlan({"t": sharding})}).to_json()
    for optimizer in ("exact_row_wise_adagrad", "lamb"):
        case = case_of(ranks.world_size, ["row_wise"], tables=[table], backend="native", optimizer=optimizer)
        for one, other in ranks.run(jobs.beside_cpu, replace(case, plan=plan), device):
            torch.testing.assert_close(one.weights, other.weights, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("scheme", FLAT)
def test_backward_never_waits_for_the_device(ranks: Any, device: str, scheme: str) -> None:
    assert all(ranks.run(jobs.backward_alone, case_of(ranks.world_size, [scheme]), device))


@pytest.mark.parametrize("ranks", [2], indirect=True, scope="module")
def test_an_error_of_one_rank_is_raised_on_all_with_the_next_batch(ranks: Any, device: str) -> None:
    """The host reads no message of rows, so the other rank finishes the step. The rank that fails steps no table."""
    case = case_of(2, ["column_wise"], optimizer="exact_row_wise_adagrad")
    for (place, errors, _), (_, errors_of_1, unchanged) in zip(*ranks.run(jobs.failing, case, device), strict=True):
        assert errors[0] == errors[2] == errors_of_1[2] == "", place
        assert all("rank 1: no memory left" in error for error in (errors[1], *errors_of_1[:2])), place
        assert unchanged or place.startswith("weights"), place


def test_distinct_ids_cost_no_further_wait(ranks: Any, device: str) -> None:
    """The number of distinct ids comes with the one read of the device."""
    if device != "ledger" or ranks.world_size == 1:
        pytest.skip("counted on the ledger device of several ranks")
    sequences = case_of(2, ["row_wise", "table_wise"], tables=cases.sequence_tables(), sequence=True, dedup=True)
    pooled = case_of(2, ["row_wise", "column_wise"])
    routed = ShardingPlan.from_json(pooled.plan).with_route(DISTINCT_ROWS).to_json()
    for case in (sequences, replace(pooled, plan=routed)):
        for steps in ranks.run(jobs.forward_waits, case):
            for lines in steps:
                assert [line.partition(":")[0] for line in lines] == ["recshard_lab/distributed/step/batch.py"]
