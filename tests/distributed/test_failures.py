"""An error on one rank: every rank raises it, with the rank's number, and nothing is lost."""

from typing import Any

import pytest

from tests.distributed import failure_jobs as jobs
from tests.patience import scaled


def call(ranks: Any, job: Any, *arguments: Any) -> Any:
    """What every rank returns, within the limit."""
    return ranks.call(job, arguments, timeout_s=scaled(30))


def all_raise(errors: Any, kind: str = "MemoryError") -> None:
    """Every rank raised the same error, which names rank 1."""
    assert set(errors) == {f"{kind}: rank 1: {jobs.FAULT}"}


# ---- reshard ----

BEFORE = {
    "settle": ("distributed.sharded_collections:ShardedCollection.settle", 0),
    "check": ("distributed.sharded_collections:ShardedCollection.check", 1),
    "read states": ("distributed.state.reshard:DenseStates.__init__", 1),
    "check states": ("distributed.state.reshard:DenseStates.check", 0),
}
STEPS = {
    "place the first collection": ("distributed.sharded_collections:ShardedCollection.place", 0),
    "place the second collection": ("distributed.sharded_collections:ShardedCollection.place", 1),
    "states of the second collection": ("distributed.state.reshard:DenseStates.moves", 1),
    "pack a message": ("distributed.state.moves:_Exchange.__init__", 0),
    "unpack a message": ("distributed.state.moves:_Exchange.unpack", 0),
    "optimizers of the second collection": ("distributed.state.reshard:DenseStates.finish", 1),
    "bind the tables' parameters": ("distributed.sharded_collections:ShardedCollection.bind_parameters", 3),
    "bind the fused optimizer": ("distributed.fused_optimizer:EmbeddingFusedOptimizer.bind", 0),
}
PARKED = {
    "park the first collection": ("distributed.state.reshard:parked", 0),
    "park the second collection": ("distributed.state.reshard:parked", 1),
    "pack the third message": ("distributed.state.moves:_Exchange.__init__", 2),
}


@pytest.mark.gate
@pytest.mark.parametrize("step", BEFORE)
def test_a_reshard_that_fails_on_one_rank_before_any_move_leaves_every_rank_as_it_was(two: Any, step: str) -> None:
    unchanged(two, *BEFORE[step], None)


@pytest.mark.gate
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("bound", [None, 1 << 10], ids=["beside", "parked"])
def test_a_reshard_that_fails_on_one_rank_leaves_every_rank_as_it_was(two: Any, step: str, bound: int | None) -> None:
    unchanged(two, *STEPS[step], bound)


@pytest.mark.parametrize("step", PARKED)
def test_a_reshard_in_bounded_memory_that_fails_on_one_rank_leaves_every_rank_as_it_was(two: Any, step: str) -> None:
    unchanged(two, *PARKED[step], 1 << 10)


def unchanged(ranks: Any, where: str, number: int, bound: int | None, *more: Any) -> None:
    errors, counts, now, later, moved = zip(
        *call(ranks, jobs.reshard_failing, where, number, bound, *(more or (None, None))), strict=True
    )
    all_raise(errors)
    assert max(counts) > number
    assert [*now, *later, *moved] == [[]] * 3 * ranks.world_size


def test_tables_that_cannot_return_to_memory_wait_in_their_file(two: Any) -> None:
    for rank, (error, used, again, changed) in enumerate(call(two, jobs.no_memory_to_return, 1 << 10)):
        assert error.startswith(f"RuntimeError: rank 1: MemoryError: {jobs.FAULT}: the tables are in a file")
        assert ["the tables are in a file" in each for each in used] == [rank == 1] * len(used)
        assert again == ""
        assert changed == []


# ---- constructors ----

BUILDING = [
    "distributed.model_parallel:DistributedModelParallel._read_arguments",
    "distributed.model_parallel:DistributedModelParallel._check_plan",
    "distributed.sharded_collections:ShardedCollection.place",
    "distributed.state.moves:_Exchange.__init__",
    "distributed.state.moves:_Exchange.unpack",
    "distributed.model_parallel:DistributedModelParallel._place_dense",
]


@pytest.mark.parametrize("where", BUILDING)
def test_a_constructor_that_fails_on_one_rank_fails_on_all(two: Any, where: str) -> None:
    errors, counts = zip(*call(two, jobs.construct_failing, where, None), strict=True)
    all_raise(errors)
    assert min(counts) >= 1
    assert len(set(call(two, jobs.works_after))) == 2


@pytest.mark.parametrize(
    ("what", "named"),
    [
        ("shards", "the plan: shards of table 't' in module '' is [(0, (0, 24), (0, 8), 'hbm')] on rank 0 and [(1, "),
        ("kernel", "the plan: compute_kernel of table 't' in module '' is 'fused' on rank 0 and 'dense' on rank 1"),
        ("rows", "num_embeddings of table 't' in module '' is 24 on rank 0 and 25 on rank 1"),
        ("name", "table 't' in module ''"),
        ("optimizer", "the model: optimizer of table 't' in module '' is OptimizerSpec(optimizer=<EmbOptimType.ADAM"),
        ("frozen", "the model: requires_grad of table 't' in module '' is True on rank 0 and False on rank 1"),
        ("codecs", "the sharders: qcomm_codecs_registry of EmbeddingBagCollectionSharder is None on rank 0"),
        ("dense", "the model: parameter '1.weight' is ((1, 8), 'torch.float32', True) on rank 0 and ((1, 9), "),
        ("no plan", "the plan"),
        ("switch", "the arguments: init_data_parallel is True on rank 0 and False on rank 1"),
        ("device", "rank 1: device must be a torch.device"),
    ],
)
def test_a_constructor_names_what_differs_between_ranks(two: Any, what: str, named: str) -> None:
    kinds = ["dmp", *(["sharder", "2d"] if what in ("shards", "rows") else [])]
    for kind in kinds:
        errors = call(two, jobs.construct_apart, what, kind)
        assert len(set(errors)) == 1
        assert errors[0].startswith("ValueError" if what == "device" else "PlanError: the ranks disagree about the ")
        assert named in errors[0] or (what == "rows" and "plan: shards" in errors[0])
    assert len(call(two, jobs.works_after)) == 2


# ---- other collective calls ----


def test_planning_that_fails_on_rank_0_fails_on_all(two: Any) -> None:
    for alone, constructor in call(two, jobs.plan_failing):
        assert alone == f"PlanError: planning failed on rank 0: MemoryError: {jobs.FAULT}"
        assert constructor == f"MemoryError: rank 0: {jobs.FAULT}"


def test_sync_and_shard_that_fail_on_one_rank_fail_on_all(two: Any) -> None:
    for error in call(two, jobs.sync_failing):
        assert error.startswith("ValueError: rank 1: table ")
        assert "pass optimizers=[that optimizer]" in error
    for error in call(two, jobs.shard_failing):
        assert error.startswith("ValueError: rank 1: no sharder supports Linear")


def test_a_state_dict_that_does_not_fit_on_one_rank_is_refused_on_all(two: Any) -> None:
    for one, both in call(two, jobs.state_dict_apart):
        assert one.startswith("RuntimeError: rank 1: ")
        assert both.startswith("RuntimeError: Error(s) in loading")
        assert all("table 'a0' is 24 x 8, the state has (25, 8)" in each for each in (one, both))
