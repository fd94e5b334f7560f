"""The simulated step: hand-computed cases, its bounds, and that faster parts never make it longer."""

from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from recshard_lab.planner.model.simulation import (
    AHEAD,
    DENSE,
    FORWARD_SHARE,
    GRADIENTS,
    INPUT,
    LOOKUP,
    ROWS,
    UPDATE,
    StepParts,
    steady_ms,
)

NONE = np.zeros(6)
WAYS = [("none", False), *((name, threads) for name in ("sparse_dist", "prefetch") for threads in (False, True))]


def parts(host: Any = None, device: Any = None, network: Any = None, **others: Any) -> StepParts:
    """A step of phase -> ms; phases left out take no time."""
    arrays = [np.array([float((given or {}).get(phase, 0)) for phase in range(6)]) for given in (host, device, network)]
    return StepParts(*arrays, **others)


def ms(step: StepParts, pipeline: str = "sparse_dist", threads: bool = False) -> float:
    return float(steady_ms(step, pipeline, threads))


def test_without_a_pipeline_and_with_a_free_host_the_step_is_the_sum() -> None:
    network = {INPUT: 1, ROWS: 3, GRADIENTS: 4, UPDATE: 1}
    step = parts(None, dict.fromkeys(range(6), 2.0), network, sizes_ms=0.5, sync_ms=0.25, copy_ms=0.125)
    assert ms(step, "none") == pytest.approx(12 + 9 + 0.875)


def test_without_a_pipeline_the_host_stops_for_the_sizes_and_runs_ahead_afterwards() -> None:
    step = parts(host={INPUT: 1, LOOKUP: 2, UPDATE: 2}, device={LOOKUP: 7, UPDATE: 1}, sizes_ms=3)
    assert ms(step, "none") == pytest.approx(1 + 3 + 7 + 1)  # the launch of the update is done before the lookup is
    assert ms(replace(step, device=step.device / 10), "none") == pytest.approx(1 + 3 + 2 + 2)


BUSY = [
    (parts(host={LOOKUP: 2, DENSE: 3, UPDATE: 4}, device={LOOKUP: 1, DENSE: 1}), "host"),
    (parts(device={INPUT: 2, DENSE: 3, UPDATE: 4}, host={DENSE: 1}), "device"),
    (parts(network={INPUT: 7, ROWS: 1, GRADIENTS: 1}, device={DENSE: 1}), "network"),
    (parts(device={LOOKUP: 2, DENSE: 3}, network={ROWS: 1, GRADIENTS: 3}), "chain"),
    (parts(device={DENSE: 3}, copy_ms=9), "copy"),
]


def test_a_step_takes_as_long_as_the_resource_that_it_keeps_busy() -> None:
    for step, resource in BUSY:
        needs = step.needs()
        assert max(needs, key=lambda name: float(needs[name])) == resource
        for pipeline in ("sparse_dist", "prefetch"):
            assert ms(step, pipeline) == pytest.approx(9), resource


def test_ids_travel_while_the_batch_before_is_computed() -> None:
    step = parts(device={DENSE: 5}, network={INPUT: 3})
    assert ms(step, "none") == pytest.approx(8)
    assert ms(step) == pytest.approx(5)
    assert ms(replace(step, network=2 * step.network)) == pytest.approx(6)


def test_under_sparse_dist_the_host_waits_for_sizes_in_each_step_and_under_prefetch_for_those_of_two() -> None:
    step = parts(sizes_ms=6.0)
    assert ms(step) == pytest.approx(6)
    assert ms(step, "prefetch") == pytest.approx(3)


def test_the_host_reads_sizes_once_a_step() -> None:
    step = parts(host={LOOKUP: 2}, sync_ms=3.0)
    assert ms(step) == pytest.approx(5)
    assert ms(step, threads=True) == pytest.approx(3)  # the second thread waits


def test_a_second_thread_launches_the_input_side_and_holds_the_lock_for_a_part_of_it() -> None:
    step = parts(host={INPUT: 4, DENSE: 6}, lock_share=0.25)
    assert ms(step) == pytest.approx(10)
    assert ms(step, threads=True) == pytest.approx(6 + 0.25 * 4)
    assert ms(replace(step, lock_share=1.0), threads=True) == pytest.approx(10)  # then threads gain nothing


def test_the_dense_gradient_is_averaged_beside_backward_but_for_its_last_bucket() -> None:
    backward = (1 - FORWARD_SHARE) * 6
    assert ms(parts(device={DENSE: 6}, network={DENSE: 2.0})) == pytest.approx(6 + 2)
    assert ms(parts(device={DENSE: 6}, network={DENSE: 2.0}, buckets=2)) == pytest.approx(6 + 1)
    slow = parts(device={DENSE: 6}, network={DENSE: 8.0}, buckets=2)  # each bucket takes longer than half of backward
    assert ms(slow) == pytest.approx(6 - backward / 2 + 8)


def test_several_steps_at_once_are_those_one_by_one() -> None:
    drawn = np.random.default_rng(0).random((3, 6, 4))
    together = steady_ms(StepParts(*drawn), "prefetch")
    alone = [ms(StepParts(*drawn[..., i]), "prefetch") for i in range(4)]
    np.testing.assert_allclose(together, alone)


def some_parts() -> st.SearchStrategy[StepParts]:
    time = st.one_of(st.just(0.0), st.floats(0.01, 5.0))
    phases = st.lists(time, min_size=6, max_size=6).map(np.array)
    network = phases.map(lambda drawn: drawn * (np.arange(6) != LOOKUP))  # a lookup sends nothing
    return st.builds(StepParts, phases, phases, network, time, time, time, st.integers(1, 3), st.floats(0, 1))


@given(some_parts(), st.sampled_from(WAYS), st.integers(0, 5), st.sampled_from([0.0, 0.5]))
def test_a_step_lies_between_its_bounds_and_faster_parts_never_lengthen_it(
    step: StepParts, way: tuple[str, bool], phase: int, factor: float
) -> None:
    found = ms(step, *way)
    total = sum(float(np.sum(getattr(step, each.name))) for each in fields(step)[:6])
    assert max(map(float, step.needs(way[1]).values())) <= found * (1 + 1e-9)
    assert found <= total * (1 + 1e-9)
    for name in ("host", "device", "network"):
        changed = getattr(step, name).copy()
        changed[phase] *= factor
        faster = ms(replace(step, **{name: changed}), *way)
        assert faster <= found * 1.05  # two nearly equal cycles of waits may take longer than WARM_UP to settle


def test_the_time_between_batches_is_steady(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = [StepParts(*np.random.default_rng(seed).random((3, 6)), 0.2, 0.1, 0.5, 2) for seed in range(30)]
    found = [[ms(step, *way) for step in drawn] for way in WAYS]
    monkeypatch.setattr("recshard_lab.planner.model.simulation.WARM_UP", 60)
    np.testing.assert_allclose([[ms(step, *way) for step in drawn] for way in WAYS], found)
    assert set(AHEAD) == {name for name, _ in WAYS}
