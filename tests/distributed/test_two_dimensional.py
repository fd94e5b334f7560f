"""2D parallel: replicas of sharded models are what unsharded models averaged by hand are."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from recshard_lab import (
    DistributedModelParallel,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    ParameterSharding,
    RankError,
    ShardingPlan,
    load_checkpoint,
    save_checkpoint,
)
from recshard_lab.comm import ReplicaGrid, ShardingEnv
from recshard_lab.distributed import DMPCollection
from recshard_lab.planner import Workload, estimate
from recshard_lab.planner.sweep.replicas import Replicated
from recshard_lab.sharding import Topology
from recshard_lab.sharding.schemes import scheme_names
from tests.distributed import cases
from tests.distributed import two_dimensional_jobs as jobs
from tests.distributed.jobs import Case, Model, train_unsharded
from tests.distributed.two_dimensional_jobs import Trained

WORLD = 4
MIXED = ["row_wise", "column_wise", "table_wise", "data_parallel"]


def case_of(schemes: list[str], size: int, optimizer: str = "exact_sgd", steps: int = 6, **more: Any) -> Case:
    made = cases.random_steps(3, cases.TABLES, WORLD, steps, samples=4)
    plan = cases.plan_of(cases.TABLES, schemes, size)
    return Case(cases.TABLES, plan.to_json(), made, optimizer, eps=1e-3, **more)


def close(found: dict[str, torch.Tensor], truth: dict[str, torch.Tensor]) -> None:
    for name, value in truth.items():
        difference = float((found[name].view(value.shape) - value).abs().max())
        assert difference <= 1e-5 * max(1.0, float(value.abs().max())), name


def check(case: Case, results: list[Trained], size: int, every: int, contiguous: bool = False, **more: Any) -> None:
    truth, grads = jobs.train_truth(case, size, every, contiguous, **more)
    for number, group in enumerate(jobs.groups_of(WORLD, size, contiguous)):
        for rank in group:
            close(results[rank].state, truth[number])
            assert not results[rank].copies_differ or not every
            for found, expected in zip(results[rank].grads, grads, strict=True):
                for one, other in zip(found, expected, strict=True):
                    torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)


@pytest.mark.gate
@pytest.mark.parametrize("scheme", scheme_names())
def test_sgd_with_a_sync_after_every_step_is_the_unsharded_model_on_all_batches(four: Any, scheme: str) -> None:
    case = case_of([scheme], 2)
    results = four.run(jobs.train_2d, case, 2, 1)
    truth = train_unsharded(case)
    for result in results:
        close(result.state, truth.weights)
        assert all(torch.equal(value, results[0].state[name]) for name, value in result.state.items())
    check(case, results, 2, 1)


@pytest.mark.parametrize("contiguous", [False, True])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_without_a_sync_every_group_learns_from_its_own_batches(four: Any, size: int, contiguous: bool) -> None:
    case = case_of(MIXED, size, "exact_row_wise_adagrad")
    results = four.run(jobs.train_2d, case, size, 0, contiguous)
    check(case, results, size, 0, contiguous)
    first, *others = (results[group[0]].state for group in jobs.groups_of(WORLD, size, contiguous))
    name = "collection.embedding_bags.users.weight"
    assert all(not torch.equal(first[name], other[name]) for other in others)


@pytest.mark.parametrize("optimizer", ["exact_row_wise_adagrad", "exact_adagrad"])
@pytest.mark.parametrize("states", [True, False])
@pytest.mark.parametrize("size", [1, 2])
def test_optimizer_states_are_averaged_when_asked_and_left_alone_when_not(
    four: Any, optimizer: str, states: bool, size: int
) -> None:
    case = case_of(MIXED, size, optimizer, sequence=False)
    results = four.run(jobs.train_2d, case, size, 3, states=states)
    truth, _ = jobs.train_truth(case, size, 3, states=states)
    for number, group in enumerate(jobs.groups_of(WORLD, size, False)):
        for rank in group:
            close(results[rank].state, truth[number])
    for name, value in results[0].state.items():
        same = all(torch.equal(value, result.state[name]) for result in results)
        assert same == (states or "/" not in name), name
    assert bool(states) == (not any(result.copies_differ for result in results))


@pytest.mark.parametrize("contiguous", [False, True])
def test_steps_stay_inside_the_group_and_a_sync_between_replicas(four: Any, contiguous: bool) -> None:
    case = case_of(MIXED, 2, "exact_adagrad", steps=4)
    results = four.run(jobs.train_2d, case, 2, 4, contiguous)
    groups = jobs.groups_of(WORLD, 2, contiguous)
    replicas = [list(ranks) for ranks in zip(*groups, strict=True)]
    for rank, result in enumerate(results):
        mine, alike = (next(g for g in each if rank in g) for each in (groups, replicas))
        seen = set()
        for event in result.events:
            kind = event.label.split("/")[0]
            allowed = {"dense": list(range(WORLD)), "replicas": alike}.get(kind, mine)
            assert {to for to, count in enumerate(event.bytes_to) if count} <= set(allowed), event
            seen.add(kind)
        assert {"dense", "replicas", "input_dist", "output_dist"} <= seen
        sent = [event for event in result.events if event.label.startswith("replicas")]
        others = sum(count for event in sent for to, count in enumerate(event.bytes_to) if to != rank)
        assert result.held_bytes <= others <= result.held_bytes + 8 * len(sent)  # 2 (R - 1) / R of it, padded
    tables = [EmbeddingBagConfig(**table) for table in case.tables]
    replicas_of = Replicated(Topology(WORLD), 2, contiguous)
    load = Workload(optimizer=case.optimizer)
    predicted = estimate(ShardingPlan.from_json(case.plan), {cases.PATH: tables}, replicas_of.group, load)
    assert replicas_of.sync_bytes(predicted) == max(result.held_bytes for result in results)


def halved(tensors: list[torch.Tensor]) -> None:
    """What a hook may do: a plain all-reduce over everybody, replicas or not, of tensors that are alike inside."""
    for tensor in tensors:
        torch.distributed.all_reduce(tensor)
        tensor.div_(torch.distributed.get_world_size())


def hooked(case: Case) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    found = []
    for more in ({"custom_all_reduce": halved}, {"sharding_strategy": "per_module"}):
        dmp = jobs.build(case, 1, **more)
        jobs.train(dmp, case, case.steps, 2)
        found.append(jobs.everything(dmp))
    return found[0], found[1]


def test_an_all_reduce_of_ones_own_serves_as_well(four: Any) -> None:
    case = case_of(["table_wise"], 1, "exact_adagrad", steps=2)
    for mine, own in four.run(hooked, case):
        close(mine, own)


def test_what_torch_optimizers_keep_about_dense_tables_is_averaged_too(four: Any) -> None:
    case = case_of(["row_wise"], 2)
    case.plan = cases.plan_of(cases.TABLES, ["row_wise"], 2, "dense").to_json()
    results = four.run(jobs.dense_states, case)
    for rank in range(WORLD):
        twin = rank ^ 1  # replicas of a part are neighbours
        for own, other, synced in zip(results[rank][0], results[twin][0], results[rank][1], strict=True):
            assert not torch.equal(own, other)
            torch.testing.assert_close(synced, (own + other) / 2)


def drawn_on_meta() -> torch.Tensor:
    """A table whose ranks draw other numbers each."""
    torch.manual_seed(torch.distributed.get_rank())
    table = EmbeddingBagConfig(40, 8, "t", feature_names=["f"])
    model = EmbeddingBagCollection([table], device=torch.device("meta"))
    dmp = DMPCollection(model, torch.device("cpu"), None, WORLD, 2, None)
    return dmp.full_state_dict()["embedding_bags.t.weight"]


def test_replicas_of_a_model_on_meta_start_alike(four: Any) -> None:
    first, *others = four.run(drawn_on_meta)
    assert first.unique().numel() > 300
    assert all(torch.equal(first, other) for other in others)


# ---- moving ----


@pytest.mark.parametrize("optimizer", ["exact_row_wise_adagrad", "exact_sgd", "dense"])
def test_two_dimensions_become_one_and_come_back_bit_for_bit(four: Any, optimizer: str) -> None:
    kernel = "dense" if optimizer == "dense" else "fused"
    sizes, case = [2, 4, 1, 2], case_of(MIXED, 2, "exact_sgd" if optimizer == "dense" else optimizer, steps=7)
    case.plan = cases.plan_of(cases.TABLES, MIXED, 2, kernel).to_json()
    plans = [cases.plan_of(cases.TABLES, MIXED[n:] + MIXED[:n], size, kernel).to_json() for n, size in enumerate(sizes)]
    results = four.run(jobs.regrouped, case, sizes, plans[1:], optimizer)
    for wrong, moved, _ in results:
        assert not wrong
        assert moved == results[0][1]


# ---- what it looks like ----


FORMS = ("sharded_tensor", "dtensor")


def looked_at(case: Case, folder: str) -> tuple[str, list[int], list[int], Any, Any]:
    dmp = jobs.build(case, 2)
    jobs.train(dmp, case, case.steps, 0)
    dmp.sync()
    state = dict(dmp.state_dict())
    for form in FORMS:
        dcp.save(dict(dmp.state_dict(form=form)), checkpoint_id=f"{folder}/{form}")
    tensor = state["collection.embedding_bags.users.weight"]
    ranks = [shard.placement.rank() for shard in tensor.metadata().shards_metadata]
    mesh = dmp.device_mesh
    return dmp.show(), ranks, mesh.mesh.tolist(), list(mesh.mesh_dim_names), jobs.everything(dmp)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_tables_are_sharded_tensors_of_the_group_that_checkpoints_can_write(four: Any, tmp_path: Path) -> None:
    case = case_of(["row_wise"], 2)
    results = four.run(looked_at, case, str(tmp_path / "saved"))
    for rank, (text, ranks, mesh, names, _) in enumerate(results):
        assert text.startswith("2 replicas on 2 ranks each: {0, 2} {1, 3}\ntable")
        assert sorted(ranks) == ([0, 2] if rank % 2 == 0 else [1, 3])
        assert mesh == [[0, 2], [1, 3]]
        assert names == ["replicate", "shard"]
    for form in FORMS:
        loaded = Model(case).state_dict()
        dcp.load(loaded, checkpoint_id=tmp_path / "saved" / form, no_dist=True)
        for name, value in loaded.items():
            assert torch.equal(value, results[0][-1][name]), name


def saved_and_loaded(case: Case, folder: str) -> tuple[str, list[dict[str, torch.Tensor]]]:
    """The refusal of replicas apart, and the state saved, loaded by new replicas, and by one model on all ranks."""
    dmp = jobs.build(case, 2)
    jobs.train(dmp, case, case.steps, 0)
    said = ""
    try:
        save_checkpoint(folder, dmp)
    except ValueError as error:
        said = str(error)
    dmp.sync()
    save_checkpoint(folder, dmp)
    found = [jobs.everything(dmp)]
    for size, contiguous in ((2, True), (4, False)):
        fresh = jobs.build(Case(**(vars(case) | {"seed": case.seed + size})), size, contiguous)
        load_checkpoint(folder, fresh)
        found.append(jobs.everything(fresh))
    return said, found


def test_a_checkpoint_of_replicas_loads_into_replicas_and_into_one_model(four: Any, tmp_path: Path) -> None:
    case = case_of(["row_wise", "column_wise"], 2, "exact_row_wise_adagrad", steps=3)
    results = four.run(saved_and_loaded, case, str(tmp_path / "saved"))
    for said, (saved, *loaded) in results:
        assert "call sync() first" in said
        for found in loaded:
            assert found.keys() == saved.keys()
            assert all(torch.equal(value, results[0][1][0][name]) for name, value in found.items())
    plain = Model(case)
    load_checkpoint(tmp_path / "saved", plain)
    for name, value in plain.state_dict().items():
        assert torch.equal(value, results[0][1][0][name]), name


# ---- what is refused ----


def one_table() -> EmbeddingBagCollection:
    return EmbeddingBagCollection(
        [EmbeddingBagConfig(name="t", num_embeddings=10, embedding_dim=4, feature_names=["f"])]
    )


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"sharding_group_size": 3}, r"sharding_group_size=3 does not divide 4 ranks.*use one of 1, 2, 4"),
        ({"sharding_group_size": 0}, "sharding_group_size=0 does not divide"),
        ({"world_size": 8}, "world_size=8, but the process group has 4 ranks"),
        ({"node_group_size": 3}, "node_group_size=3 does not divide a sharding group of 2"),
        (
            {"sharding_strategy": "fully_sharded"},
            "sharding_strategy='fully_sharded' is not supported.*default, per_module",
        ),
        ({"submodule_configs": [1]}, "submodule_configs"),
        ({"use_sharded_relay": True}, "use_sharded_relay=True is not supported"),
    ],
)
def test_arguments_that_cannot_be_are_refused_with_the_fix(four: Any, arguments: dict[str, Any], named: str) -> None:
    with pytest.raises(RankError, match=named):
        four.run(refusing, arguments)


def refusing(arguments: dict[str, Any]) -> None:
    settings = {"world_size": WORLD, "sharding_group_size": 2} | arguments
    DMPCollection(one_table(), device="cpu", plan=None, global_pg=torch.distributed.group.WORLD, **settings)


def refusals() -> list[str]:
    """Messages of what must be refused on every rank, and leaves the ranks in step."""
    said = []
    rank, everybody = torch.distributed.get_rank(), torch.distributed.group.WORLD

    def attempt(call: Any) -> None:
        try:
            call()
        except ValueError as error:
            said.append(str(error))

    wide = ShardingPlan({"": {"t": ParameterSharding("row_wise", ranks=[0, 1, 2, 3])}})  # type: ignore[dict-item]
    attempt(lambda: DMPCollection(one_table(), "cpu", wide, WORLD, 2, everybody))
    attempt(lambda: DMPCollection(one_table(), "cpu", None, WORLD, 1 + rank % 2, everybody))
    plans = [ShardingPlan({"": {"t": ParameterSharding("table_wise", ranks=[k])}}) for k in (0, 1)]  # type: ignore[dict-item]
    attempt(lambda: DMPCollection(one_table(), "cpu", plans[rank % 2], WORLD, 2, everybody))
    attempt(lambda: DistributedModelParallel(one_table()).sync())
    dense = ShardingPlan({"": {"t": ParameterSharding("table_wise", "dense", ranks=[0])}})  # type: ignore[dict-item]
    attempt(lambda: DMPCollection(one_table(), "cpu", dense, WORLD, 2, everybody).sync())
    dmp = DMPCollection(one_table(), "cpu", plans[0], WORLD, 2, everybody)
    dmp(jobs.batch_of({"f": [[1]]}))
    attempt(lambda: dmp.reshard(plans[1], sharding_group_size=4))
    dmp.sync()
    attempt(lambda: dmp.reshard(ShardingPlan({}), sharding_group_size=4))
    attempt(lambda: dmp.reshard(plans[1], sharding_group_size=3))
    attempt(lambda: dmp.reshard(plans[rank % 2]))
    attempt(lambda: dmp.reshard(plans[1], sharding_group_size=4 if rank else 2))
    dmp.reshard(plans[1], sharding_group_size=4)
    return said


def test_every_refusal_names_the_fix_and_leaves_all_ranks_in_step(four: Any) -> None:
    expected = [
        "the plan places tables on 4 ranks, but a sharding group has 2. Fix: plan for Topology",
        "disagree about the arguments: sharding_group_size is 1 on rank 0 and 2 on rank 1",
        "disagree about the plan",
        "train replicas with DMPCollection",
        "pass optimizers=[that optimizer]",
        "call sync() first",
        "add an entry",
        "use one of 1, 2, 4",
        "disagree about the plan",
        "disagree about the arguments of reshard: sharding_group_size is 2 on rank 0 and 4 on rank 1",
    ]
    for said in four.run(refusals):
        assert len(said) == len(expected), said
        for text, part in zip(said, expected, strict=True):
            assert part in text


@pytest.mark.parametrize("contiguous", [False, True])
def test_a_grid_is_ranks_reshaped(contiguous: bool) -> None:
    for size in (1, 2, 3, 6):
        grid = ReplicaGrid(ShardingEnv(6, 4, pg=object()), size, contiguous)
        assert grid.sharding_groups == jobs.groups_of(6, size, contiguous)
        place = grid.sharding_groups[grid.group].index(4)
        assert 4 in grid.replica_groups[place]


@pytest.mark.parametrize(
    ("local", "size", "contiguous", "expected"), [(4, 4, True, 4), (4, 4, False, 2), (2, 4, False, 1), (4, 8, True, 4)]
)
def test_nodes_of_a_group_are_those_of_the_machine(local: int, size: int, contiguous: bool, expected: int) -> None:
    world = ShardingEnv(8, 0, pg=object(), local_size=local)
    assert ReplicaGrid(world, size, contiguous).ranks_per_node == expected
