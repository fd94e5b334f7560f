"""Sharded towers compute and learn what the unsharded ones do, with one node and with several.

TorchRec 1.8 cannot be the reference for all of it on a CPU. There its DistributedModelParallel refuses towers, and a
tower over sequences raises an IndexError. What it runs is compared in tests/compat/parity/cases/towers.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import recshard_lab
from tests.distributed import tower_jobs as jobs

NODES = [(2, 1), (2, 2), (4, 2)]  # ranks, ranks per node


@pytest.fixture(scope="module", params=[2, 4], ids=lambda n: f"W{n}")
def ranks(request: pytest.FixtureRequest) -> Iterator[Any]:
    with recshard_lab.launch(request.param) as launched:
        yield launched


@pytest.fixture(params=[1, 2], ids=lambda n: f"L{n}")
def local(request: pytest.FixtureRequest, ranks: Any) -> int:
    """Ranks per node."""
    if (ranks.world_size, request.param) not in NODES:
        pytest.skip("two nodes of two ranks are enough for four ranks")
    return int(request.param)


def check(results: list[Any], optimizer: str = "exact_sgd") -> None:
    outputs, weights = jobs.unsharded(len(results), optimizer)
    check_outputs([found for found, *_ in results], outputs)
    for _, state, *names in results:
        assert names in ([], [list(weights)])
        for name, weight in weights.items():
            torch.testing.assert_close(state[name], weight, msg=lambda text, name=name: f"{name}: {text}")


def check_outputs(results: list[list[torch.Tensor]], outputs: list[torch.Tensor]) -> None:
    for rank, found in enumerate(results):
        for step, out in enumerate(found):
            start = sum(jobs.batch(step, before)[0].stride() for before in range(rank))
            torch.testing.assert_close(out, outputs[step][start : start + len(out)])


@pytest.mark.parametrize("optimizer", jobs.OPTIMIZERS)
def test_sharded_towers_train_as_unsharded_ones(ranks: Any, local: int, optimizer: str) -> None:
    check(ranks.run(jobs.trained, local, optimizer), optimizer)


def test_towers_train_under_the_plan_of_the_planner(ranks: Any, local: int) -> None:
    check(ranks.run(jobs.trained_by_planner, local))


@pytest.mark.parametrize(("nodes", "local_size"), [(1, 2), (2, 2), (2, 4), (3, 1)])
def test_the_planner_keeps_the_tables_of_a_tower_on_one_node(nodes: int, local_size: int) -> None:
    plan = jobs.planned(nodes, local_size)
    assert set(plan) == {f"towers.towers.{n}.embedding" for n in range(3)} | {"alone.embedding"}
    for path, tables in plan.items():
        assert {scheme for scheme, _ in tables.values()} <= {"table_row_wise", "table_column_wise"}
        assert len({rank // local_size for _, placed in tables.values() for rank in placed}) == 1, path


def test_a_tower_without_the_wrapper_runs_stage_by_stage_and_averages_its_interaction(ranks: Any, local: int) -> None:
    out, after, grads = jobs.standalone_truth(ranks.world_size)
    results = ranks.run(jobs.standalone, local)
    torch.testing.assert_close(torch.cat([found for found, *_ in results]), out)
    torch.testing.assert_close(torch.cat([found for _, found, *_ in results]), after)
    for _, _, own, names, sharded in results:
        assert set(own) == set(grads) == {"linear.weight", "linear.bias"}
        for name, grad in grads.items():
            torch.testing.assert_close(own[name], grad)
        assert names[:2] == ["embedding.embedding_bags.a.weight", "embedding.embedding_bags.b.weight"]
        assert sorted(sharded) == sorted(f"m.{name}" for name in names)


def test_what_a_tower_cannot_do_is_an_error_on_every_rank(ranks: Any, local: int) -> None:
    several = ranks.world_size > local
    results = ranks.run(jobs.errors, local)
    for found in results:
        if several:
            assert "an interaction runs on one" in found["apart"]
            assert "an interaction runs on one" in found["reshard apart"]
            assert "feature 'f_a' of a tower is not in the batch, which has ['x']" in found["missing on rank 0"]
            assert "towers exchange batches of one size" in found["variable"]
            assert "torch.int64. Fix: return floating-point numbers" in found["another dtype"]
            assert "interaction failed" in found["second forward"]
        assert "'towers.towers.0.embedding'. Fix: plan all of them" in found["some towers"]
        assert "table 'x' of the plan for module 'towers' is in 0 of its collections" in found["unknown"]
        assert "reads one batch, got two" in found["two batches"]
        assert "Fix: return one tensor [B, ...]" in found["another shape"]
        assert found["good afterwards"] == "nothing"
    assert "interaction failed" in results[-1]["second forward"]


def test_outputs_of_other_shapes_and_ranks_without_samples(ranks: Any, local: int) -> None:
    for found in ranks.run(jobs.shaped, local):
        for output, expected in found:
            assert output.shape == expected.shape
            torch.testing.assert_close(output, expected)


def test_a_tower_moves_to_another_node(ranks: Any, local: int) -> None:
    results = ranks.run(jobs.moved, local)
    for before, after, learned in results:
        torch.testing.assert_close(before, after)
        assert not torch.allclose(after, learned)


def test_a_checkpoint_and_a_copy_have_the_towers(ranks: Any, local: int, tmp_path: Path) -> None:
    for differences in ranks.run(jobs.saved, local, str(tmp_path / "checkpoint")):
        assert max(differences) < 1e-6


def test_every_rank_has_the_running_statistics_of_the_towers_node(ranks: Any, local: int) -> None:
    first, *others = ranks.run(jobs.buffers, local)
    assert int(first["alone.interaction.1.num_batches_tracked"]) == 2
    assert float(first["alone.interaction.1.running_mean"].abs().max()) > 0
    for found in others:
        for name, value in first.items():
            assert torch.equal(value, found[name]), name


@pytest.mark.parametrize("kind", ["fully shard", "static graph"])
def test_towers_beside_other_ways_to_replicate_the_dense_part(ranks: Any, local: int, kind: str) -> None:
    check_outputs(ranks.run(jobs.wrapped, local, kind), jobs.unsharded(ranks.world_size, "exact_sgd")[0])


def test_towers_in_a_pipeline(ranks: Any, local: int) -> None:
    results = ranks.run(jobs.pipelined, local)
    check_outputs([outputs for outputs, _ in results], jobs.unsharded(ranks.world_size, "exact_sgd")[0])
    for _, report in results:
        line = next(line for line in report.splitlines() if line.startswith("model.alone.embedding"))
        assert ("its ids are sent ahead" in line) == (ranks.world_size == local), line


def test_sharded_towers_are_served(ranks: Any, local: int) -> None:
    for expected, found in ranks.run(jobs.served, local):
        torch.testing.assert_close(found, expected)


def test_sharded_towers_are_served_on_devices_of_one_process() -> None:
    dmp = recshard_lab.DistributedModelParallel(jobs.model(), sharders=jobs.sharders()).eval()
    served = recshard_lab.serving.shard_for_inference(dmp, devices=["cpu", "cpu"])
    torch.testing.assert_close(served(*jobs.batch(0, 0)), dmp(*jobs.batch(0, 0)).detach())


def test_replicas_of_towers(ranks: Any) -> None:
    check(ranks.run(jobs.two_dimensional))


def test_looked_up_rows_stay_on_the_node_of_their_tower(ranks: Any, local: int) -> None:
    results = ranks.run(jobs.messages, local)
    crossing = {label for sent in results for label, size in sent.items() if size}
    several = {"towers/sizes", "towers/ids", "towers/forms", "towers/outputs", "input_dist/sizes"}
    assert crossing == (several if ranks.world_size > local else set())
