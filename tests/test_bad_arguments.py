"""Any value of any argument of a public name gives a result or a ValueError that names the fault.

Each call below is right. Its arguments are those that it names and those with a default. Each in turn
gets other values, and the test uses what the call returns. tests/sparse has such a test of its structures.
"""

import contextlib
import functools
import inspect
import json
import re
from collections.abc import Callable
from enum import EnumType
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import SGD

import recshard_lab as rl
from recshard_lab import data, distributed, embedding, models, optim, planner, sharding, train
from recshard_lab.data import SamplePart, scaled_rows
from recshard_lab.embedding import LRU_EvictionPolicy, ManagedCollisionCollection
from recshard_lab.launcher.payload import encode
from recshard_lab.sharding import construct_module_sharding_plan
from recshard_lab.sources import read_source
from recshard_lab.train import metrics, pipelines
from recshard_lab.train.launch_costs import compile_dense
from recshard_lab.train.stages import events_from_chrome_trace
from tests.grid import every
from tests.refusals import not_refused

SIZES: dict[str, Any] = {"num_embeddings": 10, "embedding_dim": 4, "name": "t", "feature_names": ["f"]}
GROWING: dict[str, Any] = {"name": "t", "embedding_dim": 4, "capacity": 128, "feature_names": ["f"]}
EVICT = LRU_EvictionPolicy()
ZCH = {"t": embedding.HashZchManagedCollisionModule(10, "cpu", 1)}


def bags(**more: Any) -> rl.EmbeddingBagConfig:
    return rl.EmbeddingBagConfig(**SIZES | more)


def rows(**more: Any) -> rl.EmbeddingConfig:
    return rl.EmbeddingConfig(**SIZES | more)


def dynamic() -> rl.DynamicEmbeddingConfig:
    return rl.DynamicEmbeddingConfig(**GROWING)


def managed(sequence: bool = False) -> dict[str, Any]:
    """Arguments of a collection of embeddings with managed collisions."""
    remapping = ManagedCollisionCollection(ZCH, [rows() if sequence else bags()])
    plain = {"embedding_collection": rl.EmbeddingCollection([rows()])}
    pooled = {"embedding_bag_collection": ebc()}
    return {
        **(plain if sequence else pooled),
        "managed_collision_collection": remapping,
        "return_remapped_features": True,
    }


def batch() -> rl.KeyedJaggedTensor:
    return rl.KeyedJaggedTensor(["f"], torch.tensor([1, 2, 9]), lengths=torch.tensor([2, 0, 1]))


def ebc(**more: Any) -> rl.EmbeddingBagCollection:
    return rl.EmbeddingBagCollection([bags()], **more)


def two_tables() -> rl.EmbeddingBagCollection:
    return rl.EmbeddingBagCollection([bags(), rl.EmbeddingBagConfig(5, 4, "u", feature_names=["h"])])


SHARDS = [rl.Shard(0, (0, 5), (0, 4)), rl.Shard(0, (5, 10), (0, 4))]
ON_TWO = [rl.Shard(0, (0, 5), (0, 4)), rl.Shard(1, (5, 10), (0, 4))]
PLAN = rl.ShardingPlan({"": {"t": rl.ParameterSharding("custom", shards=SHARDS)}})  # type: ignore[dict-item]
JUNK: list[Any] = [
    *(None, 0, -1, 3, 2**70, 1.5, float("nan"), "x", b"x", [], [1], ["a"], [None], {}, {"a": 1}, {1: "a"}, (), (0, 1)),
    *(torch.tensor(3), torch.tensor([1.5, float("nan")]), torch.tensor([[1, 2]]), torch.ones(2, device="meta")),
    *(np.arange(3), object(), object, len, nn.Linear(2, 2), bags(), batch(), sharding.ShardingType.ROW_WISE),
    *(rl.Topology(2), PLAN),
]


class Arguments:
    """Makes the call of one entry of `CALLS`, and keeps the name of its function and what may be replaced.

    Args:
        replaced: argument -> what it gets instead.
    """

    def __init__(self, **replaced: Any) -> None:
        self.replaced = replaced

    def __call__(self, function: Callable[..., Any], *fixed: Any, **right: Any) -> Any:
        """Calls `function` with arguments that are never replaced, and with right ones that may be."""
        self.name = getattr(function, "__qualname__", "")
        self.names = list(right)
        if not isinstance(function, EnumType) and function is not dict:
            free = inspect.signature(functools.partial(function, *fixed)).parameters.values()
            self.names = [p.name for p in free if p.name in right or p.default is not p.empty]
            self.names += [name for name in right if name not in self.names]
        return function(*fixed, **right | self.replaced)


def stepped(optimizer: Any) -> None:
    """An optimizer that could be made takes a step."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.ones_like(parameter)
    optimizer.step()


def learned(output: Any) -> None:
    output.values().sum().backward()


def looked_up(config: Any) -> None:
    """A config that could be made makes a collection, and that a lookup."""
    kind: Any = rl.EmbeddingBagCollection if isinstance(config, rl.EmbeddingBagConfig) else rl.EmbeddingCollection
    if config.num_embeddings * config.embedding_dim < 10_000:
        kind([config])(batch())


def divides(generator: Any) -> None:
    """A generator that could be made divides a table."""
    generator(bags(), rl.Topology(4, local_world_size=2))


def trains(sharder: Any) -> None:
    """A sharder that could be made shards, and the model learns."""
    learned(rl.DistributedModelParallel(ebc(), sharders=[sharder])(batch()))


def plans(made: Any) -> None:
    made.plan_tables([bags()])


def constrained(constraints: rl.ParameterConstraints) -> rl.EmbeddingShardingPlanner:
    return rl.EmbeddingShardingPlanner(rl.Topology(2), 8, constraints={"t": constraints})


def as_json(sharding: Any) -> str:
    return rl.ShardingPlan({"": {"t": sharding}}).resolved([bags()], 2).to_json()  # type: ignore[dict-item]


@functools.cache
def planned() -> rl.ShardingPlan:
    return rl.EmbeddingShardingPlanner(rl.Topology(2), 8).plan_tables([bags()])


def closed(pipeline: Any, batches: Any = None) -> None:
    """A pipeline that could be made takes a batch if there is one."""
    with pipeline, contextlib.suppress(StopIteration):
        if batches is not None:
            batches(pipeline.progress)


def loaded(model: nn.Module, state_dict: Any) -> None:
    """Keys that are missing are torch's own RuntimeError, which users of ``strict=True`` know."""
    with contextlib.suppress(*[RuntimeError] if isinstance(state_dict, dict) else []):
        model.load_state_dict(state_dict)


def in_folder(action: Callable[[Path], Any]) -> None:
    with TemporaryDirectory() as folder:
        action(Path(folder))


def read_file(read: Callable[[Any], Any], name: str, text: str, path: Any) -> None:
    """The file `name` is there and is read. Other values reach the reader as they are."""
    with TemporaryDirectory() as folder, contextlib.suppress(FileNotFoundError):
        if path == name:
            path = Path(folder, name)
            path.write_text(text)
        read(path)


def preprocessed(folder: Path, arguments: Arguments, **right: Any) -> Path:
    (folder / "day_0").write_text("\t".join(["1", *["5"] * 13, *["0000000a"] * 26]) + "\n")
    arguments(data.preprocess_criteo, [folder / "day_0"], folder / "out", **right)
    return folder / "out"


def criteo(arguments: Arguments, folder: Path) -> None:
    arguments(data.CriteoClicks.open, preprocessed(folder, Arguments(), hash_size=50), days=[0])


class OnTwoNodes:
    """Ranks that cannot be calibrated: whatever else is right or wrong, nothing runs."""

    world_size, nodes, backend, run = 2, 2, "gloo", None


def calibrated(call: Callable[..., Any], **right: Any) -> None:
    """Refused for its nodes at the latest."""
    with pytest.raises(ValueError, match=r"nodes|ranks|seconds|seed"):
        call(rl.calibration.calibrate, **right)


class Clicks(nn.Module):
    """The smallest model of ratings."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, dense_features: torch.Tensor, sparse_features: rl.KeyedJaggedTensor) -> torch.Tensor:
        return self.bias.expand(len(dense_features), 1) + 0.0


def weight() -> nn.Parameter:
    return nn.Parameter(torch.ones(2, 2))


def keyed() -> optim.KeyedOptimizerWrapper:
    return optim.KeyedOptimizerWrapper({"w": weight()}, lambda params: SGD(params, lr=0.1))


def small_run() -> dict[str, Any]:
    rows = {"name": "synthetic-criteo", "num_samples": 8, "test_samples": 4, "rows": [5, 6], "num_dense": 2}
    model = {"name": "dlrm", "embedding_dim": 4, "over_arch_layer_sizes": [1]}
    return {"model": model, "data": rows, "batch_size": 4, "epochs": 1, "log": {"progress": "off"}, "metrics": []}


def config() -> train.TrainConfig:
    return train.TrainConfig.model_validate(small_run())


MEASURED: dict[str, Any] = {
    **{
        "world_size": 2,
        "local_world_size": 2,
        "compute_device": "cpu",
        "cores_per_host": 2,
        "machine": {"system": "x"},
    },
    **{"figures": {"peer_ms": 0.1, "update_cost": {"exact_sgd": 1.0}}, "date": "2026-01-01", "seconds": 9.0},
}
PROFILE = sharding.DeviceProfile(**MEASURED, spread={})
RATINGS = data.SyntheticRatings(num_users=20, num_movies=15, num_ratings=80, seed=0)
CLICKS = data.SyntheticClicks(20, rows=[5, 6])
LR: dict[str, Any] = {"optimizer_type": SGD, "optimizer_kwargs": {"lr": 0.1}}
INIT = {"weight_init_max": 1.0, "weight_init_min": -1.0, "init_fn": nn.init.zeros_}
BETAS = {"lr": 0.1, "weight_decay": 0.1, "betas": (0.9, 0.99), "eps": 1e-8}
DENSE = {"dense_in_features": 3, "dense_arch_layer_sizes": [4], "over_arch_layer_sizes": [4, 1]}
MADE: dict[str, Any] = {"planner": rl.EmbeddingShardingPlanner(rl.Topology(2), 8), "tables": [bags()]}
SHARES = sharding.RowShares.zipf(10, 1.1)
SCORED = {"scores": torch.tensor([0.1, 0.9]), "labels": torch.tensor([0, 1])}
GROUPED = {**SCORED, "groups": torch.zeros(2, dtype=torch.int64)}
TABLES = "name,num_embeddings,embedding_dim,feature_names\nt,10,4,f\n"
CONSTRAINTS = '{"t": {"ranks": [0]}}'
WIDTHS = {"hidden_layer_size": 4, "deep_fm_dimension": 2}
INT4 = {"data_type": rl.DataType.INT4}
ERRORS = {"before_error": 0.2, "new_error": 0.1, "new_before_error": 0.3}
ONE_RANK = {"world_size": 1, "sharding_group_size": 1}
STEP = {"tables": [bags()], "topology": rl.Topology(2), "workload": rl.Workload(8)}


def piped(call: Callable[..., Any], kind: Callable[..., Any], batches: Any = None) -> None:
    model = nn.Linear(2, 1)
    closed(call(kind, model=model, optimizer=SGD(model.parameters(), lr=0.1), device="cpu"), batches)


#: a right call each, which uses what it returns
CALLS: list[Callable[[Any], Any]] = [
    # enums
    lambda call: call(rl.DataType, value="FP32"),
    lambda call: call(rl.PoolingType, value="SUM"),
    lambda call: call(embedding.EmbOptimType, value="adam"),
    lambda call: call(embedding.WeightDecayMode, value=1),
    lambda call: call(optim.GradientClipping, value="norm"),
    lambda call: call(optim.WarmupPolicy, value="linear"),
    lambda call: call(rl.comm.CommType, value="fp16"),
    lambda call: call(sharding.EmbeddingComputeKernel, value="fused"),
    lambda call: call(sharding.ShardingType, value="row_wise"),
    # tables
    lambda call: looked_up(call(rl.EmbeddingBagConfig, **SIZES, **INIT)),
    lambda call: looked_up(call(rl.EmbeddingConfig, **SIZES, **INIT)),
    lambda call: call(rl.EmbeddingBagCollection, tables=[bags()]),
    lambda call: call(rl.EmbeddingCollection, tables=[rows()]),
    lambda call: call(rl.EmbeddingCollection([rows()]).forward, features=batch()),
    lambda call: call(embedding.QuantEmbeddingBagCollection, tables=[bags(**INT4)])(batch()),
    lambda call: call(embedding.QuantEmbeddingCollection, tables=[rows(**INT4)])(batch()),
    lambda call: call(embedding.QuantEmbeddingBagCollection.from_float, module=ebc()),
    lambda call: call(rl.quantize_embeddings(ebc()).forward, features=batch()),
    lambda call: call(embedding.quantization_report, trained=(plain := ebc()), served=rl.quantize_embeddings(plain)),
    lambda call: call(embedding.QuantizationReport, tables=(), scores={}),
    lambda call: call(rl.quantize_embeddings, module=ebc())(batch()),
    lambda call: call(embedding.Tier, kind="host", capacity=128, cost=embedding.EmulatedCost(1), name="slow"),
    lambda call: call(sharding.CacheParams, load_factor=0.2, cost=embedding.EmulatedCost(1)),
    lambda call: call(embedding.EmulatedCost, latency_us=1.0, gb_per_s=2.0),
    lambda call: call(embedding.KTRegroupAsDict, groups=[["a"]], keys=["x"]),
    lambda call: learned(call(rl.FusedEmbeddingBagCollection, tables=[bags()], **LR)(batch())),
    lambda call: call(rl.FusedEmbeddingBagCollection([bags()], **LR).forward, features=batch()),
    lambda call: call(rl.FusedEmbeddingBagCollection([bags()], **LR).set_learning_rate, lr=0.1),
    lambda call: call(embedding.FusedEmbeddingCollection, tables=[rows()], **LR),
    lambda call: call(embedding.fuse_embedding_optimizer, model=ebc(), **LR),
    # tables that grow
    lambda call: learned(rl.DynamicEmbeddingBagCollection([call(rl.DynamicEmbeddingConfig, **GROWING)], **LR)(batch())),
    lambda call: learned(call(rl.DynamicEmbeddingBagCollection, tables=[dynamic()], **LR)(batch())),
    lambda call: call(rl.DynamicEmbeddingCollection, tables=[dynamic()], **LR),
    lambda call: call(embedding.VocabularyEmbeddingBagCollection, tables=[dynamic()])(batch()),
    lambda call: call(embedding.VocabularyEmbeddingCollection, tables=[dynamic()])(batch()),
    lambda call: call(embedding.export_static, collection=rl.DynamicEmbeddingCollection([dynamic()], **LR), path=None),
    lambda call: call(
        embedding.MCHManagedCollisionModule, zch_size=10, device="cpu", eviction_policy=EVICT, eviction_interval=1
    ),
    lambda call: call(embedding.HashZchManagedCollisionModule, zch_size=10, device="cpu", total_num_buckets=2),
    lambda call: call(ManagedCollisionCollection, managed_collision_modules=ZCH, embedding_configs=[bags()])(batch()),
    lambda call: call(embedding.ManagedCollisionEmbeddingBagCollection, **managed())(batch()),
    lambda call: call(embedding.ManagedCollisionEmbeddingBagCollection(**managed()).forward, features=batch()),
    lambda call: call(embedding.ManagedCollisionEmbeddingCollection, **managed(sequence=True))(batch()),
    # optimizers
    lambda call: call(
        optim.apply_optimizer_in_backward, optimizer_class=SGD, params=[weight()], optimizer_kwargs={"lr": 0.1}
    ),
    lambda call: stepped(call(optim.RowWiseAdagrad, params=[weight()], lr=0.1, weight_decay=0.1, eps=1e-08)),
    lambda call: stepped(call(optim.LAMB, params=[weight()], **BETAS)),
    lambda call: stepped(call(optim.PartialRowWiseAdam, params=[weight()], **BETAS)),
    lambda call: stepped(call(optim.PartialRowWiseLAMB, params=[weight()], **BETAS)),
    lambda call: stepped(call(optim.LarsSGD, params=[weight()], lr=0.1, weight_decay=0.1, momentum=0.9, eta=0.1)),
    lambda call: stepped(call(optim.CombinedOptimizer, optims=[keyed()])),
    lambda call: stepped(
        call(optim.GradientClippingOptimizer, optimizer=keyed(), clipping=optim.GradientClipping.NORM, max_gradient=0.1)
    ),
    lambda call: call(optim.KeyedOptimizer, params={"w": weight()}, state={}, param_groups=[]).state_dict(),
    lambda call: call(keyed().load_state_dict, state_dict=keyed().state_dict()),
    lambda call: stepped(
        call(optim.KeyedOptimizerWrapper, params={"w": weight()}, optim_factory=lambda params: SGD(params, lr=0.1))
    ),
    lambda call: optim.WarmupOptimizer(
        keyed(),
        [call(optim.WarmupStage, policy=optim.WarmupPolicy.LINEAR, max_iters=3, value=0.5, decay_iters=2)],
        lr=0.1,
    ).step(),
    lambda call: stepped(
        call(
            optim.WarmupOptimizer,
            optimizer=keyed(),
            lr=0.1,
            stages=[optim.WarmupStage(optim.WarmupPolicy.LINEAR, max_iters=4, value=0.1)],
        )
    ),
    # calibration
    lambda call: str(call(rl.calibration.Calibration, profile=PROFILE, before=rl.Topology(2), figures=(), **ERRORS)),
    lambda call: call(sharding.DeviceProfile, **MEASURED, spread={}).topology(),
    lambda call: call(sharding.DeviceProfile.from_json, text=PROFILE.to_json()),
    lambda call: call(
        functools.partial(read_file, rl.Topology.from_profile, "p.json", PROFILE.to_json()), path="p.json"
    ),
    lambda call: in_folder(
        lambda folder: (
            PROFILE.save(folder / "p.json"),
            call(rl.Topology.from_profile, folder / "p.json", world_size=2, reserve_fraction=0.2),
        )
    ),
    lambda call: calibrated(call, ranks=OnTwoNodes(), seconds=9.0, progress=False),
    # models
    lambda call: call(rl.DLRM, embedding_bag_collection=ebc(), **DENSE),
    lambda call: call(models.DLRM_DCN, embedding_bag_collection=ebc(), **DENSE, dcn_num_layers=2, dcn_low_rank_dim=2),
    lambda call: call(models.DeepFMNN, embedding_bag_collection=ebc(), dense_in_features=3, deep_layer_sizes=[4]),
    lambda call: call(models.SimpleDeepFMNN, num_dense_features=3, embedding_bag_collection=ebc(), **WIDTHS),
    lambda call: call(models.TwoTower, embedding_bag_collection=two_tables(), layer_sizes=[4], query_tables=["t"]),
    lambda call: call(
        models.TwoTowerTrainTask, two_tower=models.TwoTower(two_tables(), [4]), temperature=0.5, candidate_id="h"
    ),
    lambda call: call(
        models.FeatureProcessedEmbeddingBagCollection,
        embedding_bag_collection=ebc(is_weighted=True),
        feature_processors={"f": models.PositionWeightedModule(3)},
    ),
    lambda call: call(models.PositionWeightedModule, max_feature_length=3)(batch()["f"]),
    lambda call: call(models.build_model, name="dlrm", tables=[bags()], settings={"dense_in_features": 3}),
    lambda call: call(rl.DLRM(ebc(), 3, [4], [4, 1]).forward, dense_features=torch.ones(3, 3), sparse_features=batch()),
    # data
    lambda call: call(data.SyntheticRatings, num_ratings=80, num_users=20, num_movies=15, why="no"),
    lambda call: list(call(data.BatchLoader, source=CLICKS, batch_size=8, window=16)),
    lambda call: call(data.BatchLoader(CLICKS, 8).state_dict, batches_ahead=0),
    lambda call: call(data.BatchLoader(CLICKS, 8).load_state_dict, state=data.BatchLoader(CLICKS, 8).state_dict()),
    lambda call: call(data.BatchLoader(CLICKS, 8).set_epoch, epoch=1),
    lambda call: call(data.SyntheticClicks, num_samples=10, rows=[5, 6], num_dense=2).batch(range(1)),
    lambda call: call(data.ChurningClicks, num_samples=10, rows=[5, 6], churning=["cat_1"]).batch(range(1)),
    lambda call: call(CLICKS.batch, samples=range(0, 3)),
    lambda call: call(scaled_rows, memory_bytes=1 << 20, rows=[5, 600], embedding_dim=8, item_bytes=4),
    lambda call: call(SamplePart, whole=CLICKS, begin=0, end=1),
    lambda call: call(data.MultiHot, sizes=[1, 3], rows=[5, 6]),
    lambda call: call(data.MultiHot([1, 3], rows=[5, 6]), batch=CLICKS.batch(range(3))),
    lambda call: call(data.build_dataset, config={"name": "synthetic-ratings", "num_ratings": 100}),
    lambda call: data.build_dataset(
        {"name": "synthetic-criteo"} | call(dict, num_samples=8, test_samples=2, rows=[5], seed=0)
    ),
    lambda call: in_folder(lambda folder: preprocessed(folder, call, hash_size=50, threads=1)),
    lambda call: in_folder(lambda folder: criteo(call, folder)),
    lambda call: call(RATINGS.select, samples=torch.tensor([0, 3])),
    lambda call: call(RATINGS.split, by="random", test_fraction=0.2),
    lambda call: call(RATINGS.num_batches, batch_size=8),
    lambda call: next(iter(call(RATINGS.batches, batch_size=8)), None),
    # plans
    lambda call: str(
        rl.ShardingPlan(
            {"": call(lambda entries: sharding.EmbeddingModuleShardingPlan(entries), entries=PLAN.plan[""])}
        ).validate([bags()], 2)
    ),
    lambda call: plans(constrained(call(rl.ParameterConstraints))),
    lambda call: as_json(call(rl.ParameterSharding, sharding_type="custom", ranks=[0, 1], shards=ON_TWO)),
    lambda call: sharding.tiling([call(rl.Shard, rank=0, rows=(0, 10), cols=(0, 4))])(bags(), rl.Topology(2)),
    lambda call: call(rl.ShardingPlan, plan=PLAN.plan).resolved([bags()], 2).show(),
    lambda call: call(PLAN.resolved, tables=[bags()], world_size=2, local_world_size=2),
    lambda call: call(PLAN.validate, tables=[bags()], world_size=2),
    lambda call: call(PLAN.pairs, tables=[bags()]),
    lambda call: call(PLAN.with_route, route="direct"),
    lambda call: str(call(planned().explain, table="t", **MADE)),
    lambda call: str(call(planned().diff, other=PLAN, **MADE)),
    lambda call: str(call(planned().why_not, constraints={"t": "row_wise"}, **MADE)),
    lambda call: call(planned().to_script, model=None, **MADE),
    lambda call: call(rl.ShardingPlan.from_json, text=PLAN.to_json()),
    lambda call: call(PLAN.get_plan_for_module, module_path=""),
    lambda call: call(rl.Topology, world_size=2),
    lambda call: call(rl.Topology(2).node_of, rank=0),
    lambda call: call(rl.Topology.preset, name="h100", world_size=8, local_world_size=8, hbm_cap=9),
    lambda call: call(sharding.preset_table, name="h100"),
    lambda call: call(sharding.apply_to_all, module=ebc(), parameter_sharding_generator=rl.row_wise()),
    lambda call: call(
        construct_module_sharding_plan, module=ebc(), per_param_sharding={"t": rl.row_wise()}, world_size=2
    ),
    lambda call: divides(call(rl.table_wise, rank=1)),
    lambda call: divides(call(rl.row_wise, boundaries=[4], ranks=[0, 1])),
    lambda call: divides(call(rl.row_wise, sizes=[4, 6], ranks=[0, 1])),
    lambda call: divides(call(rl.row_wise, sizes_placement=([4, 6], "cpu"), ranks=[0, 1])),
    lambda call: divides(call(rl.row_wise, num_buckets=5, ranks=[0, 1])),
    lambda call: divides(call(rl.column_wise, ranks=[0, 1], size_per_rank=[2, 2])),
    lambda call: divides(call(rl.table_row_wise, host_index=1)),
    lambda call: divides(call(rl.table_column_wise, host_index=1, size_per_rank=[2, 2])),
    lambda call: divides(call(rl.grid_shard, host_indexes=[0])),
    lambda call: divides(call(rl.flex_shard, hot_rows=4, ranks=[0, 1])),
    lambda call: divides(call(rl.data_parallel)),
    lambda call: divides(call(sharding.tiling, rects=ON_TWO)),
    lambda call: call(sharding.RowShares, edges=(0.0, 5.0, 10.0), shares=(0.0, 0.9, 1.0)),
    lambda call: call(sharding.RowShares.of_ids, batches=[[1, 1, 2]], num_embeddings=10),
    lambda call: call(sharding.RowShares.zipf, num_embeddings=10, alpha=1.1),
    lambda call: call(SHARES.share, start=0, end=5),
    lambda call: call(SHARES.rows_for, share=0.5),
    lambda call: call(SHARES.distinct, start=0, end=5, num_ids=10),
    lambda call: call(SHARES.sizes, count=2, first_row=1, evenness=0.5),
    # planner
    lambda call: plans(call(rl.EmbeddingShardingPlanner, topology=rl.Topology(2), workload=rl.Workload(8))),
    lambda call: call(rl.EmbeddingShardingPlanner(rl.Topology(2)).plan, module=ebc()),
    lambda call: call(rl.EmbeddingShardingPlanner(rl.Topology(2)).plan_tables, tables=[bags()]),
    lambda call: call(rl.estimate, plan=PLAN, **STEP),
    lambda call: call(
        lambda tables, topology, **more: rl.plan(tables, topology, **more), **STEP, constraints={"t": "row_wise"}
    ),
    lambda call: rl.estimate(PLAN, [bags()], rl.Topology(2), call(rl.Workload, batch_size=8)),
    lambda call: call(planner.AccessProfile, uses=(1.0,), rows=(2.0,), pooling_factor=2.0),
    lambda call: call(planner.AccessProfile.of_ids, batches=[np.arange(3)]),
    lambda call: call(planner.AccessProfile((1.0,), (2.0,)).distinct, num_ids=1.0, num_embeddings=2.0),
    lambda call: call(planner.AccessProfile((1.0,), (2.0,)).hottest, rows=1.0),
    lambda call: call(functools.partial(read_file, planner.read_tables, "t.csv", TABLES), path="t.csv"),
    lambda call: call(read_source, source="tests.cli.models:dlrm"),
    lambda call: call(functools.partial(read_file, planner.read_constraints, "c.json", CONSTRAINTS), path="c.json"),
    lambda call: in_folder(
        lambda folder: (
            (folder / "c.json").write_text(CONSTRAINTS),
            call(planner.read_constraints, folder / "c.json", tables=["t"]),
        )
    ),
    lambda call: call(rl.Workload.measured, batches=[batch()], tables=[bags()]),
    lambda call: call(rl.Workload().pooling_factor, feature="f"),
    lambda call: call(rl.Workload().knows_repeats, table="t"),
    lambda call: str(call(rl.sweep, tables=[bags()], workload=rl.Workload(8), topology=["h100"], progress=False)),
    lambda call: call(lambda axis: rl.sweep([bags()], world_size=2).pareto(axis), axis="step_ms"),
    lambda call: call(planner.tier_shares, plan=PLAN, **STEP),
    lambda call: call(planner.compare_servers, tables=[bags()], workload=rl.Workload(8), workers=[2, 4]),
    lambda call: call(planner.mlperf_example, world_sizes=[8]),
    lambda call: call(planner.mlperf_dlrm_dcnv2_tables),
    lambda call: call(planner.mlperf_dlrm_dcnv2_workload, batch_size=8, zipf_alpha=1.0),
    # ranks
    lambda call: rl.comm.get_qcomm_codecs_registry(call(rl.comm.QCommsConfig)),
    lambda call: call(rl.comm.codec_error, codec=rl.comm.CommType.INT8, tensor=torch.ones(2, 4)),
    lambda call: call(rl.comm.get_qcomm_codecs_registry, qcomms_config=rl.comm.QCommsConfig(), device="cpu"),
    lambda call: call(rl.DistributedModelParallel, module=ebc(), plan=PLAN),
    lambda call: call(rl.DistributedModelParallel(ebc()).reshard, plan=PLAN, optimizers=[]),
    lambda call: call(rl.DistributedModelParallel(ebc()).forward, features=batch()),
    lambda call: call(
        functools.partial(loaded, rl.DistributedModelParallel(ebc())),
        state_dict=rl.DistributedModelParallel(ebc()).state_dict(),
    ),
    lambda call: trains(call(distributed.EmbeddingBagCollectionSharder, fused_params={"learning_rate": 0.1})),
    lambda call: trains(
        distributed.EmbeddingBagCollectionSharder(
            call(dict, optimizer="adam", learning_rate=0.1, eps=0.1, beta1=0.5, weight_decay=0.1)
        )
    ),
    lambda call: call(distributed.EmbeddingCollectionSharder, fused_params={"learning_rate": 0.1}),
    lambda call: call(distributed.ShardingEnv, world_size=1, rank=0),
    lambda call: call(distributed.ShardingEnv.from_local, world_size=1, rank=0),
    lambda call: call(rl.shard_for_inference, model=ebc(), devices=["cpu"], output_device="cpu"),
    lambda call: call(distributed.load_pretrained, model=ebc(), tables={"t": torch.ones(10, 4)}),
    lambda call: distributed.load_pretrained(ebc(), call(dict, t=torch.ones(10, 4))),
    lambda call: in_folder(lambda folder: call(rl.save_checkpoint, folder / "run", model=ebc(), extra={"epoch": 1})),
    lambda call: in_folder(
        lambda folder: call(distributed.async_save_checkpoint, folder / "run", model=ebc(), extra={"epoch": 1}).result()
    ),
    lambda call: in_folder(
        lambda folder: (rl.save_checkpoint(folder, ebc()), call(rl.load_checkpoint, path=folder, model=ebc()))
    ),
    lambda call: call(distributed.DefaultDataParallelWrapper),
    lambda call: call(distributed.DMPCollection, module=ebc(), device="cpu", plan=PLAN, global_pg=None, **ONE_RANK),
    # training
    lambda call: call(train.train_epochs, model=Clicks(), dataset=RATINGS, optimizer=None, epochs=1, batch_size=40),
    lambda call: call(train.evaluate, model=Clicks(), dataset=RATINGS, batch_size=40, device="cpu"),
    lambda call: piped(call, pipelines.TrainPipelineBase),
    lambda call: piped(call, pipelines.TrainPipelineSparseDist),
    lambda call: piped(call, pipelines.TrainPipelineSemiSync),
    lambda call: piped(call, pipelines.EvalPipelineSparseDist),
    lambda call: piped(
        Arguments(), pipelines.TrainPipelineSparseDist, lambda progress: call(progress, dataloader_iter=iter([]))
    ),
    lambda call: call(compile_dense, model=nn.Linear(2, 1), backend="eager"),
    lambda call: call(
        events_from_chrome_trace, trace={"traceEvents": [{"ph": "X", "name": "## forward 1 ##", "ts": 1.0}]}, rank=0
    ),
    lambda call: call(train.auc, **SCORED, weights=torch.ones(2)),
    lambda call: call(train.log_loss, **SCORED),
    lambda call: call(train.normalized_entropy, **SCORED),
    lambda call: call(metrics.calibration, **SCORED),
    lambda call: call(metrics.grouped_auc, **GROUPED),
    lambda call: call(metrics.ndcg, **GROUPED, k=1),
    lambda call: call(metrics.recall_at_k, **GROUPED, k=1),
    lambda call: call(
        metrics.NEMetric, world_size=1, my_rank=0, batch_size=2, tasks=[metrics.DefaultTaskInfo], window_size=4
    ).compute(),
    lambda call: call(metrics.RecallSessionMetric, k=2).compute(),
    lambda call: call(
        metrics.GAUCMetric().update,
        predictions=torch.tensor([0.1, 0.9]),
        labels=torch.tensor([0, 1]),
        weights=torch.ones(2),
        groups=torch.zeros(2, dtype=torch.int64),
    ),
    lambda call: call(metrics.NEMetric().load_state_dict, state=metrics.NEMetric().state_dict()),
    lambda call: call(metrics.ThroughputMetric, batch_size=2, world_size=1, window_seconds=3, warmup_steps=0),
    lambda call: call(
        metrics.RecMetricModule(2, 1, rec_metrics=[metrics.AUCMetric()]).update,
        model_out={"prediction": torch.tensor([0.1, 0.9]), "label": torch.tensor([0, 1])},
    ),
    lambda call: call(train.TrainConfig, **small_run()),
    lambda call: call(train.run_training, config=config()).step,
    lambda call: call(
        functools.partial(read_file, train.read_config, "run.json", json.dumps(small_run())), path="run.json"
    ),
    lambda call: in_folder(
        lambda folder: call(train.export_run, config=config(), folder=folder, topology=rl.Topology(2))
    ),
]
#: what the caller's own code raises when it is called stays as it is
OPEN = {
    "BatchLoader": {"transform"},
    "preprocess_criteo": {"on_progress"},
    "sweep": {"progress"},
    "train_epochs": {"model", "on_step"},
    "evaluate": {"model"},
    "apply_optimizer_in_backward": {"optimizer_class", "optimizer_kwargs"},
    "EmbeddingShardingPlanner": {"cost_model"},
    "estimate": {"cost_model"},
    "compile_dense": {"backend"},
}


@pytest.mark.gate
@every(range(len(CALLS)), lambda place: inspect.getsource(CALLS[place]))
def test_a_wrong_argument_is_a_value_error(place: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # some junk is the name of a file or folder
    right = Arguments()
    CALLS[place](right)
    for name in set(right.names) - OPEN.get(right.name, set()):
        for junk in JUNK:
            try:
                CALLS[place](Arguments(**{name: junk}))
            except ValueError:
                pass
            except Exception as error:
                raise AssertionError(f"{right.name}({name}={junk!r})") from error


def test_every_public_name_is_swept_here_or_where_it_lives() -> None:
    elsewhere = {"MovieLens", "PlanError"}  # files, and an error
    rooms = ("recshard_lab.sparse", "recshard_lab.launcher", "recshard_lab.lab")  # in tests/ of the same name
    named = {name: getattr(getattr(rl, name), "__module__", "") for name in dir(rl) if callable(getattr(rl, name))}
    ours = {name for name, module in named.items() if not module.startswith(rooms) and "ipython" not in name}
    assert len(ours) > 30
    assert (
        ours - elsewhere - set(re.findall(r"call\(\s*(?:lambda .*?: )?rl\.(\w+)", Path(__file__).read_text())) == set()
    )


def test_the_error_of_an_argument_of_a_wrong_type_names_its_fix() -> None:
    wrapper: Any = distributed.DefaultDataParallelWrapper
    cases: dict[str, Callable[[], Any]] = {
        "must be bool, got 'yes' .*Fix: pass static_graph=True": lambda: wrapper(static_graph="yes"),
        "env must be .*, got 3 .*Fix: pass env=<.*ShardingEnv": lambda: rl.DistributedModelParallel(ebc(), env=3),
        "device must be .* Fix: pass device='cpu'": lambda: rl.DistributedModelParallel(ebc(), device="x"),
    }
    assert not not_refused((call, words) for words, call in cases.items())


def test_a_job_may_name_functions_that_look_at_their_arguments() -> None:
    functions = (rl.table_wise, sharding.construct_module_sharding_plan, rl.FusedEmbeddingBagCollection.forward)
    assert encode(lambda: functions)
