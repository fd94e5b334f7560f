"""Relations between plans of related problems on 8 to 512 ranks: a constraint, for example, never shortens a step."""

from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np
import pytest

from benchmarks import plan
from recshard_lab.planner import EmbeddingShardingPlanner
from recshard_lab.sharding import ParameterConstraints, PlanError, Topology, scheme_names

TOLERANCE = 1.01  # the search is a heuristic: related plans may differ by 1%
SMALL = [(100, 8), (26, 16), (26, 64)]  # tables, ranks
SCHEMES = list(scheme_names())
FORBIDDEN = [
    *((size, name) for size in SMALL for name in SCHEMES),
    *(((100, 64), name) for name in ("row_wise", "grid_shard", "table_wise")),
    *(((125, 256), name) for name in ("row_wise", "table_row_wise")),
]
REST = [((26, 64), name) for name in SCHEMES]
REST += [((tables, ranks), name) for tables, ranks in ((100, 64), (125, 256), (250, 512)) for name in SCHEMES]


@lru_cache(maxsize=32)
def model(size: tuple[int, int]) -> Any:
    return plan.fitting(*size, seed=0)


def planned(tables: Any, topology: Any, workload: Any, constraints: Any = None) -> float:
    """The predicted step, in ms."""
    planner = EmbeddingShardingPlanner(topology, constraints=constraints, workload=workload)
    return planner.plan_tables(tables, explain=False).estimate.step_ms


@lru_cache(maxsize=32)
def free_ms(size: tuple[int, int]) -> float:
    return planned(*model(size))


def constrained_ms(size: tuple[int, int], **constraint: Any) -> float:
    """The step with one constraint on every table; infinite if there is no plan."""
    tables, topology, workload = model(size)
    try:
        return planned(tables, topology, workload, {table.name: ParameterConstraints(**constraint) for table in tables})
    except PlanError:
        return float("inf")


@pytest.mark.parametrize(("size", "scheme"), FORBIDDEN)
def test_forbidding_a_scheme_never_shortens_the_step(size: tuple[int, int], scheme: str) -> None:
    shortest = constrained_ms(size, forbidden_sharding_types=[scheme])
    assert free_ms(size) <= shortest * TOLERANCE


@pytest.mark.nightly
@pytest.mark.parametrize(("size", "scheme"), [case for case in REST if case not in FORBIDDEN])
def test_forbidding_a_scheme_never_shortens_the_step_of_large_models(size: tuple[int, int], scheme: str) -> None:
    assert free_ms(size) <= constrained_ms(size, forbidden_sharding_types=[scheme]) * TOLERANCE


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("size", SMALL[:2])
def test_allowing_one_scheme_alone_never_shortens_the_step(size: tuple[int, int], scheme: str) -> None:
    assert free_ms(size) <= constrained_ms(size, sharding_types=[scheme]) * TOLERANCE


@pytest.mark.nightly
@pytest.mark.parametrize(("size", "scheme"), REST)
def test_allowing_one_scheme_alone_never_shortens_the_step_of_large_models(size: tuple[int, int], scheme: str) -> None:
    assert free_ms(size) <= constrained_ms(size, sharding_types=[scheme]) * TOLERANCE


@pytest.mark.parametrize("size", SMALL)
def test_allowing_one_route_alone_never_shortens_the_step(size: tuple[int, int]) -> None:
    for route in ("direct", "two_hop"):
        assert free_ms(size) <= constrained_ms(size, route=route) * TOLERANCE, route


@pytest.mark.parametrize("size", SMALL)
def test_better_machines_never_lengthen_the_step(size: tuple[int, int]) -> None:
    tables, topology, workload = model(size)
    for name in ("hbm_cap", "inter_host_bw", "intra_host_bw"):
        better = replace(topology, **{name: getattr(topology, name) * 2})
        assert planned(tables, better, workload) <= free_ms(size) * TOLERANCE, name


@pytest.mark.parametrize("size", SMALL)
def test_fewer_tables_never_lengthen_the_step(size: tuple[int, int]) -> None:
    tables, topology, workload = model(size)
    for fewer in (tables[1:], tables[: len(tables) // 2]):
        assert planned(fewer, topology, workload.for_tables(fewer)) <= free_ms(size) * TOLERANCE


@pytest.mark.parametrize("size", SMALL)
def test_the_order_of_the_tables_does_not_matter(size: tuple[int, int]) -> None:
    tables, topology, workload = model(size)
    assert planned(tables[::-1], topology, workload) == pytest.approx(free_ms(size), rel=1e-9)


@pytest.mark.parametrize("size", SMALL)
def test_equal_ranks_are_interchangeable(size: tuple[int, int]) -> None:
    """A table that must be on one rank costs the same wherever that rank is."""
    tables, topology, workload = model(size)
    first, last = (
        planned(tables, topology, workload, {tables[0].name: ParameterConstraints(ranks=[rank])})
        for rank in (0, topology.world_size - 1)
    )
    assert first == pytest.approx(last, rel=TOLERANCE - 1)


@lru_cache(maxsize=2)
def tiered(count: int) -> Any:
    """Tables with 1.3 times the bytes of device memory, on 2 nodes of 4 ranks with host memory."""
    tables, workload = plan.ads_tables(count, 0)
    cap = int(sum(table.weight_bytes for table in tables) / 8 / 1.3)
    return tables, Topology(8, "cuda", hbm_cap=cap, ddr_cap=4 * cap, local_world_size=4, reserve_fraction=0), workload


BOTH = ("fused", "fused_uvm")


@lru_cache(maxsize=32)
def tiered_ms(kernels: tuple[str, ...] = BOTH, share: float = 1.0, number: int = 20, **machine: float) -> float:
    """The step with these kernels for a share of the tables and both memories for the others."""
    tables, topology, workload = tiered(number)
    topology = replace(topology, **{name: int(getattr(topology, name) * factor) for name, factor in machine.items()})
    count = int(share * len(tables))
    wishes = {
        table.name: ParameterConstraints(compute_kernels=list(kernels if at < count else BOTH))
        for at, table in enumerate(tables)
    }
    try:
        return planned(tables, topology, workload, wishes)
    except PlanError:
        return float("inf")


@pytest.mark.parametrize("kernel", BOTH)
def test_restricting_kernels_never_shortens_the_step(kernel: str) -> None:
    assert np.isfinite(tiered_ms())
    assert tiered_ms(("fused",)) == np.inf  # the tables need both memories
    for share in (0.25, 0.5):
        assert tiered_ms() <= tiered_ms((kernel,), share) * TOLERANCE, share


@pytest.mark.nightly
def test_restricting_kernels_of_more_tables_shortens_the_step_by_less_than_4_percent() -> None:
    """The search over both memories misses 3.5% here."""
    assert tiered_ms(number=40) <= tiered_ms(("fused",), 0.25, 40) * 1.04


@pytest.mark.parametrize("name", ["hbm_cap", "ddr_cap", "ddr_mem_bw"])
def test_more_memory_of_either_kind_never_lengthens_the_step(name: str) -> None:
    assert tiered_ms(**{name: 2}) <= tiered_ms() * TOLERANCE


@pytest.mark.parametrize("size", SMALL[:2])
def test_limits_on_shards_and_ranks_never_shorten_the_step(size: tuple[int, int]) -> None:
    ranks = size[1]
    assert free_ms(size) <= constrained_ms(size, min_partition=64) * TOLERANCE
    assert free_ms(size) <= constrained_ms(size, ranks=list(range(ranks // 2))) * TOLERANCE
    assert free_ms(size) <= constrained_ms(size, forbidden_ranks=[ranks - 1]) * TOLERANCE


def test_a_device_group_never_shortens_the_step() -> None:
    tables, topology, workload = model((26, 16))
    grouped = replace(topology, device_groups={"half": tuple(range(8))})
    wish = {table.name: ParameterConstraints(device_group="half") for table in tables[::2]}
    assert free_ms((26, 16)) <= planned(tables, grouped, workload, wish) * TOLERANCE
