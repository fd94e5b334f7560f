"""Whatever is given for an argument of a public name: a result or a ValueError that says what is wrong, nothing else.

Each call below is right. For every argument in turn, anything else is put in its place, and what comes back is used.
The structures of ``sparse`` have a sweep of their own (tests/sparse).
"""

import contextlib
import copy
import functools
import json
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import recshard_lab as rl
from recshard_lab.data import RatingsDataset, SamplePart, scaled_rows
from recshard_lab.distributed.data_parallel import DefaultDataParallelWrapper
from recshard_lab.embedding import LRU_EvictionPolicy
from recshard_lab.launcher.payload import encode
from recshard_lab.sources import read_source
from recshard_lab.train import auc, evaluate, log_loss, metrics, normalized_entropy, pipelines, train_epochs
from recshard_lab.train.launch_costs import compile_dense
from recshard_lab.train.stages import events_from_chrome_trace
from tests.grid import every

F = {"feature_names": ["f"]}


def bags() -> rl.EmbeddingBagConfig:
    return rl.EmbeddingBagConfig(name="t", num_embeddings=10, embedding_dim=4, **F)  # type: ignore[arg-type]


def sequences() -> rl.EmbeddingConfig:
    return rl.EmbeddingConfig(10, 4, "t", feature_names=["f"])


def dynamic() -> rl.DynamicEmbeddingConfig:
    return rl.DynamicEmbeddingConfig("t", 4, capacity=128, feature_names=["f"])


def managed(sequence: bool = False) -> rl.embedding.ManagedCollisionCollection:
    module = rl.embedding.HashZchManagedCollisionModule(10, "cpu", 1)
    return rl.embedding.ManagedCollisionCollection({"t": module}, [sequences() if sequence else bags()])


def batch(variable: bool = False) -> rl.KeyedJaggedTensor:
    return rl.KeyedJaggedTensor(["f"], torch.tensor([1, 2, 9]), lengths=torch.tensor([2, 0, 1]))


def ebc() -> rl.EmbeddingBagCollection:
    return rl.EmbeddingBagCollection([bags()])


def plan(**changes: Any) -> rl.ShardingPlan:
    sharding = rl.ParameterSharding("custom", shards=[rl.Shard(0, (0, 5), (0, 4)), rl.Shard(0, (5, 10), (0, 4))])
    return rl.ShardingPlan({"": {"t": sharding}})  # type: ignore[dict-item]


def dmp() -> rl.DistributedModelParallel:
    return rl.DistributedModelParallel(ebc())


def weight() -> nn.Parameter:
    return nn.Parameter(torch.ones(2, 2))


def keyed(**changes: Any) -> rl.optim.KeyedOptimizerWrapper:
    return rl.optim.KeyedOptimizerWrapper({"w": weight()}, lambda params: torch.optim.SGD(params, lr=0.1))


def planted() -> rl.data.SyntheticClicks:
    return rl.data.SyntheticClicks(20, rows=[5, 6])


def preprocessed(folder: Path, **settings: Any) -> Path:
    (folder / "day_0").write_text("\t".join(["1", *["5"] * 13, *["0000000a"] * 26]) + "\n")
    rl.data.preprocess_criteo([folder / "day_0"], folder / "out", **settings)
    return folder / "out"


@functools.cache
def criteo_files() -> TemporaryDirectory[str]:
    folder = TemporaryDirectory()
    preprocessed(Path(folder.name), hash_size=50)
    return folder


def ratings() -> RatingsDataset:
    return rl.data.SyntheticRatings(num_users=20, num_movies=15, num_ratings=80, seed=0)


JUNK: list[Any] = [
    None,
    0,
    -1,
    3,
    2**70,
    1.5,
    float("nan"),
    "x",
    b"x",
    [],
    [1],
    ["a"],
    [None],
    {},
    {"a": 1},
    {1: "a"},
    (),
    (0, 1),
    torch.tensor(3),
    torch.tensor([1.5, float("nan")]),
    torch.tensor([[1, 2]]),
    torch.ones(2, device="meta"),
    np.arange(3),
    object(),
    object,
    len,
    nn.Linear(2, 2),
    bags(),
    batch(),
    rl.sharding.ShardingType.ROW_WISE,
    rl.Topology(2),
    plan(),
]

SCORED = {"scores": torch.tensor([0.1, 0.9]), "labels": torch.tensor([0, 1])}

Call = tuple[Callable[..., Any], dict[str, Any]]


def towers() -> Any:
    """Two tables."""
    return rl.EmbeddingBagCollection([bags(), rl.EmbeddingBagConfig(5, 4, "u", feature_names=["h"])])


def used(config: Any) -> None:
    """A config that could be made makes a collection, and that a lookup."""
    kind: Any = rl.EmbeddingBagCollection if isinstance(config, rl.EmbeddingBagConfig) else rl.EmbeddingCollection
    rows = config.num_embeddings * config.embedding_dim
    if rows < 10_000:
        kind([config])(batch())


def cut(generator: Any) -> None:
    """A generator that could be made cuts a table."""
    generator(bags(), rl.Topology(4, local_world_size=2))


def stepped(optimizer: Any) -> None:
    """An optimizer that could be made takes a step."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.ones_like(parameter)
    optimizer.step()


def trained(sharder: Any) -> None:
    """A sharder that could be made shards, and the model learns."""
    model = rl.DistributedModelParallel(ebc(), sharders=[sharder])
    model(batch()).values().sum().backward()


def loaded(model: nn.Module, state_dict: Any) -> None:
    """Keys that are missing are torch's own RuntimeError, which users of ``strict=True`` know."""
    with contextlib.suppress(*[RuntimeError] if isinstance(state_dict, dict) else []):
        model.load_state_dict(state_dict)


def read_written(path: Any) -> None:
    """A file of tables that is there is read; names of other kinds go as they are."""
    with TemporaryDirectory() as folder:
        if path == "t.csv":
            path = Path(folder) / path
            path.write_text("name,num_embeddings,embedding_dim,feature_names\nt,10,4,f\n")
        rl.planner.read_tables(path)


def wishes_read(path: Any, tables: Any) -> None:
    """A file of wishes that is there is read; names of other kinds go as they are."""
    with TemporaryDirectory() as folder:
        if path == "wishes.json":
            path = Path(folder) / path
            path.write_text('{"t": {"ranks": [0]}}')
        rl.planner.read_constraints(path, tables)


class OnTwoNodes:
    """Ranks that cannot be calibrated: whatever else is right or wrong, nothing runs."""

    world_size, nodes, backend, run = 2, 2, "gloo", None


def calibrated(**own: Any) -> None:
    """Refused for its nodes at the latest."""
    with pytest.raises(ValueError, match=r"nodes|ranks|seconds|seed"):
        rl.calibration.calibrate(**own)


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (
            lambda: DefaultDataParallelWrapper(static_graph="yes"),
            "must be bool, got 'yes' .*Fix: pass static_graph=True",
        ),
        (lambda: rl.DistributedModelParallel(ebc(), env=3), "env must be .*, got 3 .*Fix: pass env=<.*ShardingEnv"),
        (lambda: rl.DistributedModelParallel(ebc(), device="x"), "device must be .* Fix: pass device='cpu'"),
    ],
)
def test_the_error_of_an_argument_of_a_wrong_type_names_its_fix(call: Callable[[], Any], error: str) -> None:
    with pytest.raises(ValueError, match=error):
        call()


def profile() -> dict[str, Any]:
    sizes = {"world_size": 2, "local_world_size": 2, "compute_device": "cpu", "cores_per_host": 2}
    figures = {"peer_ms": 0.1, "update_cost": {"exact_sgd": 1.0}}
    return {**sizes, "figures": figures, "machine": {"system": "x"}, "date": "2026-01-01", "seconds": 9.0, "spread": {}}


def read_profile(path: Any, **figures: Any) -> None:
    """A profile that is there is read; names of other kinds go as they are."""
    with TemporaryDirectory() as folder:
        if path == "here.json":
            path = Path(folder) / path
            rl.sharding.DeviceProfile(**profile()).save(path)
        with contextlib.suppress(OSError):  # no such file
            rl.Topology.from_profile(path, **figures)


def small_run() -> dict[str, Any]:
    data = {"name": "synthetic-criteo", "num_samples": 8, "test_samples": 4, "rows": [5, 6], "num_dense": 2}
    model = {"name": "dlrm", "embedding_dim": 4, "over_arch_layer_sizes": [1]}
    return {"model": model, "data": data, "batch_size": 4, "epochs": 1, "log": {"progress": "off"}, "metrics": []}


def config_read(path: Any) -> None:
    """A config that is there is read; names of other kinds go as they are."""
    with TemporaryDirectory() as folder:
        if path == "run.json":
            path = Path(folder) / path
            path.write_text(json.dumps(small_run()))
        rl.train.read_config(path)


class Clicks(nn.Module):
    """The smallest model of ratings."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, dense_features: torch.Tensor, sparse_features: rl.KeyedJaggedTensor) -> torch.Tensor:
        return self.bias.expand(len(dense_features), 1) + 0.0


def clicks() -> nn.Module:
    return Clicks()


def in_folder(action: Callable[[Path], Any]) -> None:
    with TemporaryDirectory() as folder:
        action(Path(folder))


def saved_and_loaded(path: Path, **given: Any) -> None:
    rl.save_checkpoint(path, ebc())
    rl.load_checkpoint(path, **given)


def planned(planner: Any) -> None:
    planner.plan_tables([bags()])


def made() -> rl.ShardingPlan:
    return rl.EmbeddingShardingPlanner(rl.Topology(2), 8).plan_tables([bags()])


def config_call(kind: Any, **more: Any) -> Call:
    given = {"num_embeddings": 10, "embedding_dim": 4, "name": "t", "data_type": rl.DataType.FP32, **F}
    given |= {"weight_init_max": 1.0, "weight_init_min": -1.0, "init_fn": nn.init.zeros_}
    return lambda **own: used(kind(**own)), given | more


def optimizer_call(kind: Any, **settings: Any) -> Call:
    return lambda **own: stepped(kind(**own)), {"params": [weight()], "lr": 0.1, "weight_decay": 0.1, **settings}


def cut_call(generator: Any, **given: Any) -> Call:
    return lambda **own: cut(generator(**own)), given | ({} if generator is rl.data_parallel else {"route": "direct"})


def closed(kind: Any) -> Callable[..., Any]:
    """Makes a pipeline, takes a batch through if there is one, closes it."""

    def make(dataloader_iter: Any = (), **own: Any) -> None:
        with kind(**own) as pipeline:
            if dataloader_iter != ():
                with contextlib.suppress(StopIteration):
                    pipeline.progress(dataloader_iter)

    return make


def calls() -> dict[str, Call]:
    """By public name, with ``.method`` behind a constructor's."""
    shards = [rl.Shard(0, (0, 5), (0, 4)), rl.Shard(1, (5, 10), (0, 4))]
    betas = {"betas": (0.9, 0.99), "eps": 1e-8}
    stages = [rl.optim.WarmupStage(rl.optim.WarmupPolicy.LINEAR, max_iters=4, value=0.1)]
    table = {"t": rl.ParameterConstraints()}
    dense = nn.Linear(2, 1)
    piped: dict[str, Any] = {
        "model": dense,
        "optimizer": torch.optim.SGD(dense.parameters(), lr=0.1),
        "device": "cpu",
        "custom_model_fwd": None,
        "threads": False,
        "pin_memory": None,
        "on_nan_loss": "ignore",
        "uneven": "error",
        "dmp_collection_sync_interval_batches": 1,
    }
    asked = {"planner": rl.EmbeddingShardingPlanner(rl.Topology(2), 8), "tables": [bags()]}
    return {
        "DataType": (rl.DataType, {"value": "FP32"}),
        "PoolingType": (rl.PoolingType, {"value": "SUM"}),
        "EmbOptimType": (rl.embedding.EmbOptimType, {"value": "adam"}),
        "WeightDecayMode": (rl.embedding.WeightDecayMode, {"value": 1}),
        "EmbeddingBagConfig": config_call(rl.EmbeddingBagConfig, pooling=rl.PoolingType.MEAN),
        "EmbeddingConfig": config_call(rl.EmbeddingConfig),
        "EmbeddingBagCollection": (
            lambda **own: rl.EmbeddingBagCollection(**own),
            {"tables": [bags()], "is_weighted": False, "device": "cpu", "out_of_range": "error"},
        ),
        "EmbeddingCollection": (
            lambda **own: rl.EmbeddingCollection(**own),
            {
                "tables": [rl.EmbeddingConfig(10, 4, "t", feature_names=["f"])],
                "device": "cpu",
                "need_indices": False,
                "out_of_range": "error",
            },
        ),
        "QuantEmbeddingBagCollection": (
            lambda **own: rl.embedding.QuantEmbeddingBagCollection(**own)(batch()),
            {
                "tables": [rl.EmbeddingBagConfig(10, 4, "t", rl.DataType.INT4, ["f"])],
                "is_weighted": False,
                "device": "cpu",
                "output_dtype": torch.float32,
                "out_of_range": "error",
                "backend": "native",
            },
        ),
        "QuantEmbeddingCollection": (
            lambda **own: rl.embedding.QuantEmbeddingCollection(**own)(batch()),
            {
                "tables": [rl.EmbeddingConfig(10, 4, "t", rl.DataType.INT4, ["f"])],
                "device": "cpu",
                "need_indices": False,
                "output_dtype": torch.float32,
                "out_of_range": "error",
                "backend": "native",
            },
        ),
        "QuantEmbeddingBagCollection.from_float": (
            rl.embedding.QuantEmbeddingBagCollection.from_float,
            {"module": ebc(), "dtype": rl.DataType.INT8, "output_dtype": torch.float32, "backend": "native"},
        ),
        "QuantEmbeddingBagCollection.forward": (
            lambda features: rl.quantize_embeddings(ebc())(features),
            {"features": batch()},
        ),
        "quantization_report": (
            rl.embedding.quantization_report,
            {"trained": (plain := ebc()), "served": rl.quantize_embeddings(plain), "scores": None},
        ),
        "QuantizationReport": (rl.embedding.QuantizationReport, {"tables": (), "scores": {}}),
        "quantize_embeddings": (
            lambda **own: rl.quantize_embeddings(**own)(batch()),
            {"module": ebc(), "dtype": rl.DataType.INT8, "inplace": False},
        ),
        "DynamicEmbeddingConfig": (
            lambda **own: (
                rl.DynamicEmbeddingBagCollection([rl.DynamicEmbeddingConfig(**own)], torch.optim.SGD, {"lr": 0.1})(
                    batch()
                )
                .values()
                .sum()
                .backward()
            ),
            {
                "name": "t",
                "embedding_dim": 4,
                "capacity": 128,
                "max_capacity": 256,
                "feature_names": ["f"],
                "evict": "lru",
                "admit": 1,
                "absent": "zero",
                "pooling": rl.PoolingType.SUM,
                "data_type": rl.DataType.FP32,
                "choices": 2,
                "weight_init_min": -1.0,
                "weight_init_max": 1.0,
                "tiers": [rl.embedding.Tier("host", capacity=128)],
                "seed": 0,
            },
        ),
        "Tier": (
            rl.embedding.Tier,
            {
                "kind": "host",
                "capacity": 128,
                "path": None,
                "url": None,
                "mode": "cache",
                "cost": rl.embedding.EmulatedCost(1),
                "name": "slow",
            },
        ),
        "CacheParams": (
            rl.sharding.CacheParams,
            {"algorithm": "lru", "load_factor": 0.2, "cost": rl.embedding.EmulatedCost(1)},
        ),
        "EmulatedCost": (rl.embedding.EmulatedCost, {"latency_us": 1.0, "gb_per_s": 2.0}),
        "DynamicEmbeddingBagCollection": (
            lambda **own: rl.DynamicEmbeddingBagCollection(**own)(batch()).values().sum().backward(),
            {
                "tables": [dynamic()],
                "optimizer_type": torch.optim.SGD,
                "optimizer_kwargs": {"lr": 0.1},
                "is_weighted": False,
                "device": "cpu",
                "backend": "native",
            },
        ),
        "DynamicEmbeddingCollection": (
            lambda **own: rl.DynamicEmbeddingCollection(**own),
            {
                "tables": [dynamic()],
                "optimizer_type": torch.optim.SGD,
                "optimizer_kwargs": {"lr": 0.1},
                "device": "cpu",
                "need_indices": True,
                "backend": "native",
            },
        ),
        "VocabularyEmbeddingBagCollection": (
            lambda **own: rl.embedding.VocabularyEmbeddingBagCollection(**own)(batch()),
            {"tables": [dynamic()], "is_weighted": False, "device": "cpu"},
        ),
        "VocabularyEmbeddingCollection": (
            lambda **own: rl.embedding.VocabularyEmbeddingCollection(**own)(batch()),
            {"tables": [dynamic()], "device": "cpu", "need_indices": True},
        ),
        "export_static": (
            rl.embedding.export_static,
            {
                "collection": rl.DynamicEmbeddingBagCollection([dynamic()], torch.optim.SGD, {"lr": 0.1}),
                "path": None,
            },
        ),
        "MCHManagedCollisionModule": (
            rl.embedding.MCHManagedCollisionModule,
            {
                "zch_size": 10,
                "device": "cpu",
                "eviction_policy": LRU_EvictionPolicy(),
                "eviction_interval": 1,
                "input_hash_size": 100,
                "input_hash_func": lambda ids, size: ids % size,
                "name": "t",
                "output_global_offset": 0,
                "output_segments": None,
                "buckets": 1,
            },
        ),
        "HashZchManagedCollisionModule": (
            rl.embedding.HashZchManagedCollisionModule,
            {
                "zch_size": 10,
                "device": "cpu",
                "total_num_buckets": 2,
                "max_probe": 10,
                "input_hash_size": 0,
                "output_segments": None,
                "is_inference": False,
                "name": "t",
                "eviction_policy_name": None,
                "eviction_config": None,
                "start_bucket": 0,
                "end_bucket": 2,
                "opt_in_prob": -1,
                "percent_reserved_slots": 0,
                "disable_fallback": False,
                "track_id_freq": False,
            },
        ),
        "ManagedCollisionCollection": (
            lambda **own: rl.embedding.ManagedCollisionCollection(**own)(batch()),
            {
                "managed_collision_modules": managed().modules_by_table(),
                "embedding_configs": [bags()],
                "need_preprocess": True,
            },
        ),
        "ManagedCollisionEmbeddingBagCollection": (
            lambda **own: rl.embedding.ManagedCollisionEmbeddingBagCollection(**own)(batch()),
            {
                "embedding_bag_collection": ebc(),
                "managed_collision_collection": managed(),
                "return_remapped_features": True,
                "allow_in_place_embed_weight_update": False,
            },
        ),
        "ManagedCollisionEmbeddingBagCollection.forward": (
            rl.embedding.ManagedCollisionEmbeddingBagCollection(ebc(), managed()).forward,
            {"features": batch(), "mutate_miss_lengths": True},
        ),
        "ManagedCollisionEmbeddingCollection": (
            lambda **own: rl.embedding.ManagedCollisionEmbeddingCollection(**own)(batch()),
            {
                "embedding_collection": rl.EmbeddingCollection([sequences()]),
                "managed_collision_collection": managed(sequence=True),
                "return_remapped_features": True,
                "allow_in_place_embed_weight_update": False,
            },
        ),
        "FusedEmbeddingBagCollection": (
            lambda **own: rl.FusedEmbeddingBagCollection(**own)(batch()).values().sum().backward(),
            {
                "tables": [bags()],
                "optimizer_type": torch.optim.SGD,
                "optimizer_kwargs": {"lr": 0.1},
                "is_weighted": False,
                "device": "cpu",
                "backend": "native",
            },
        ),
        "FusedEmbeddingBagCollection.forward": (
            lambda features: rl.FusedEmbeddingBagCollection([bags()], torch.optim.SGD, {"lr": 0.1})(features),
            {"features": batch()},
        ),
        "FusedEmbeddingBagCollection.set_learning_rate": (
            lambda lr: rl.FusedEmbeddingBagCollection([bags()], torch.optim.SGD, {"lr": 0.1}).set_learning_rate(lr),
            {"lr": 0.1},
        ),
        "FusedEmbeddingCollection": (
            lambda **own: rl.embedding.FusedEmbeddingCollection(**own),
            {
                "tables": [rl.EmbeddingConfig(10, 4, "t", feature_names=["f"])],
                "optimizer_type": torch.optim.SGD,
                "optimizer_kwargs": {"lr": 0.1},
                "need_indices": False,
                "backend": "native",
            },
        ),
        "fuse_embedding_optimizer": (
            lambda **own: rl.embedding.fuse_embedding_optimizer(**own),
            {
                "model": rl.EmbeddingBagCollection([bags()]),
                "optimizer_type": torch.optim.SGD,
                "optimizer_kwargs": {"lr": 0.1},
                "backend": "native",
            },
        ),
        "EmbeddingCollection.forward": (
            lambda features: rl.EmbeddingCollection([rl.EmbeddingConfig(10, 4, "t", feature_names=["f"])])(features),
            {"features": batch()},
        ),
        "KTRegroupAsDict": (rl.embedding.KTRegroupAsDict, {"groups": [["a"]], "keys": ["x"]}),
        "apply_optimizer_in_backward": (
            rl.optim.apply_optimizer_in_backward,
            {"optimizer_class": torch.optim.SGD, "params": [weight()], "optimizer_kwargs": {"lr": 0.1}},
        ),
        "RowWiseAdagrad": optimizer_call(rl.optim.RowWiseAdagrad, eps=1e-8),
        "LAMB": optimizer_call(rl.optim.LAMB, **betas),
        "PartialRowWiseAdam": optimizer_call(rl.optim.PartialRowWiseAdam, **betas),
        "PartialRowWiseLAMB": optimizer_call(rl.optim.PartialRowWiseLAMB, **betas),
        "LarsSGD": optimizer_call(rl.optim.LarsSGD, momentum=0.9, eta=0.1),
        "CombinedOptimizer": (lambda optims: stepped(rl.optim.CombinedOptimizer(optims)), {"optims": [keyed()]}),
        "GradientClipping": (rl.optim.GradientClipping, {"value": "norm"}),
        "GradientClippingOptimizer": (
            lambda **own: stepped(rl.optim.GradientClippingOptimizer(**own)),
            {
                "optimizer": keyed(),
                "clipping": rl.optim.GradientClipping.NORM,
                "max_gradient": 0.1,
                "norm_type": 2.0,
                "enable_global_grad_clip": False,
                "track_grad_norm": True,
            },
        ),
        "KeyedOptimizer": (
            lambda **own: rl.optim.KeyedOptimizer(**own).state_dict(),
            {"params": {"w": weight()}, "state": {}, "param_groups": []},
        ),
        "KeyedOptimizer.load_state_dict": (
            lambda state_dict: keyed().load_state_dict(state_dict),
            {"state_dict": keyed().state_dict()},
        ),
        "KeyedOptimizerWrapper": (
            lambda **own: stepped(rl.optim.KeyedOptimizerWrapper(**own)),
            {"params": {"w": weight()}, "optim_factory": lambda params: torch.optim.SGD(params, lr=0.1)},
        ),
        "WarmupPolicy": (rl.optim.WarmupPolicy, {"value": "linear"}),
        "WarmupStage": (
            lambda **own: rl.optim.WarmupOptimizer(keyed(), [rl.optim.WarmupStage(**own)], lr=0.1).step(),
            {"policy": rl.optim.WarmupPolicy.LINEAR, "max_iters": 3, "value": 0.5, "lr_scale": 1.0, "decay_iters": 2},
        ),
        "WarmupOptimizer": (
            lambda **own: stepped(rl.optim.WarmupOptimizer(**own)),
            {"optimizer": keyed(), "stages": stages, "lr": 0.1, "lr_param": "lr", "param_name": "__warmup"},
        ),
        "Calibration": (
            lambda **own: str(rl.calibration.Calibration(**own)),
            {
                "profile": rl.sharding.DeviceProfile(**profile()),
                "before": rl.Topology(2),
                "before_error": 0.2,
                "figures": (),
                "new_error": 0.1,
                "new_before_error": 0.3,
            },
        ),
        "DeviceProfile": (lambda **own: rl.sharding.DeviceProfile(**own).topology(), profile()),
        "DeviceProfile.from_json": (
            rl.sharding.DeviceProfile.from_json,
            {"text": rl.sharding.DeviceProfile(**profile()).to_json()},
        ),
        "Topology.from_profile": (read_profile, {"path": "here.json", "world_size": 2, "reserve_fraction": 0.2}),
        "calibrate": (calibrated, {"ranks": OnTwoNodes(), "seconds": 9.0, "progress": False, "seed": 0}),
        "DLRM": (
            lambda **own: rl.DLRM(**own),
            {
                "embedding_bag_collection": ebc(),
                "dense_in_features": 3,
                "dense_arch_layer_sizes": [4],
                "over_arch_layer_sizes": [4, 1],
            },
        ),
        "DLRM_DCN": (
            lambda **own: rl.models.DLRM_DCN(**own),
            {
                "embedding_bag_collection": ebc(),
                "dense_in_features": 3,
                "dense_arch_layer_sizes": [4],
                "over_arch_layer_sizes": [4, 1],
                "dcn_num_layers": 2,
                "dcn_low_rank_dim": 2,
            },
        ),
        "DeepFMNN": (
            lambda **own: rl.models.DeepFMNN(**own),
            {"embedding_bag_collection": ebc(), "dense_in_features": 3, "deep_layer_sizes": [4]},
        ),
        "SimpleDeepFMNN": (
            lambda **own: rl.models.SimpleDeepFMNN(**own),
            {
                "num_dense_features": 3,
                "embedding_bag_collection": ebc(),
                "hidden_layer_size": 4,
                "deep_fm_dimension": 2,
            },
        ),
        "TwoTower": (
            lambda **own: rl.models.TwoTower(**own),
            {"embedding_bag_collection": towers(), "layer_sizes": [4], "query_tables": ["t"], "normalize": True},
        ),
        "TwoTowerTrainTask": (
            rl.models.TwoTowerTrainTask,
            {
                "two_tower": rl.models.TwoTower(towers(), [4]),
                "in_batch_negatives": True,
                "temperature": 0.5,
                "candidate_id": "h",
                "frequency": None,
                "peers": None,
            },
        ),
        "FeatureProcessedEmbeddingBagCollection": (
            rl.models.FeatureProcessedEmbeddingBagCollection,
            {
                "embedding_bag_collection": rl.EmbeddingBagCollection([bags()], is_weighted=True),
                "feature_processors": {"f": rl.models.PositionWeightedModule(3)},
            },
        ),
        "PositionWeightedModule": (
            lambda **own: rl.models.PositionWeightedModule(**own)(batch()["f"]),
            {"max_feature_length": 3},
        ),
        "build_model": (
            rl.models.build_model,
            {"name": "dlrm", "tables": [bags()], "settings": {"dense_in_features": 3}, "device": "cpu"},
        ),
        "DLRM.forward": (
            lambda dense_features, sparse_features: rl.DLRM(ebc(), 3, [4], [4, 1])(dense_features, sparse_features),
            {"dense_features": torch.ones(3, 3), "sparse_features": batch()},
        ),
        "SyntheticRatings": (
            rl.data.SyntheticRatings,
            {"num_ratings": 80, "num_users": 20, "num_movies": 15, "seed": 0, "why": "no"},
        ),
        "BatchLoader": (
            lambda **own: list(rl.data.BatchLoader(**own)),
            {
                "source": planted(),
                "batch_size": 8,
                "rank": 0,
                "world_size": 1,
                "shuffle": True,
                "seed": 0,
                "drop_last": False,
                "window": 16,
                "pin_memory": False,
                "prefetch": 0,
                "transform": None,
            },
        ),
        "BatchLoader.state_dict": (rl.data.BatchLoader(planted(), 8).state_dict, {"batches_ahead": 0}),
        "BatchLoader.load_state_dict": (
            rl.data.BatchLoader(planted(), 8).load_state_dict,
            {"state": rl.data.BatchLoader(planted(), 8).state_dict()},
        ),
        "BatchLoader.set_epoch": (rl.data.BatchLoader(planted(), 8).set_epoch, {"epoch": 1}),
        "SyntheticClicks": (
            lambda **own: rl.data.SyntheticClicks(**own).batch(range(1)),
            {
                "num_samples": 10,
                "rows": [5, 6],
                "memory_bytes": 1 << 20,
                "num_dense": 2,
                "zipf": 1.0,
                "signal": 1.0,
                "click_rate": 0.2,
                "seed": 0,
            },
        ),
        "ChurningClicks": (
            lambda **own: rl.data.ChurningClicks(**own).batch(range(1)),
            {"num_samples": 10, "rows": [5, 6], "churning": ["cat_1"], "replaced": 0.5, "per": 5},
        ),
        "SyntheticClicks.batch": (planted().batch, {"samples": range(0, 3)}),
        "data.scaled_rows": (
            scaled_rows,
            {"memory_bytes": 1 << 20, "rows": [5, 600], "embedding_dim": 8, "item_bytes": 4},
        ),
        "data.SamplePart": (SamplePart, {"whole": planted(), "begin": 0, "end": 1}),
        "MultiHot": (rl.data.MultiHot, {"sizes": [1, 3], "rows": [5, 6], "distribution": "uniform", "seed": 0}),
        "MultiHot.__call__": (rl.data.MultiHot([1, 3], rows=[5, 6]), {"batch": planted().batch(range(3))}),
        "build_dataset": (rl.data.build_dataset, {"config": {"name": "synthetic-ratings", "num_ratings": 100}}),
        "build_dataset.synthetic-criteo": (
            lambda **own: rl.data.build_dataset({"name": "synthetic-criteo", **own}),
            {"num_samples": 8, "test_samples": 2, "rows": [5], "num_dense": 1, "seed": 0, "zipf": 1.0},
        ),
        "preprocess_criteo": (
            lambda **own: in_folder(lambda folder: preprocessed(folder, **own)),
            {
                "threshold": None,
                "hash_size": 50,
                "max_ind_range": 0,
                "format": "npy",
                "skip_bad": False,
                "resume": False,
                "memory_gb": 2.0,
                "threads": 1,
                "on_progress": None,
            },
        ),
        "CriteoClicks.open": (
            lambda **own: rl.data.CriteoClicks.open(Path(criteo_files().name, "out"), **own),
            {"days": [0], "in_memory": False, "check": "sizes"},
        ),
        "SyntheticRatings.select": (ratings().select, {"samples": torch.tensor([0, 3])}),
        "SyntheticRatings.split": (ratings().split, {"by": "random", "test_fraction": 0.2, "seed": 0}),
        "SyntheticRatings.num_batches": (ratings().num_batches, {"batch_size": 8, "drop_last": False}),
        "SyntheticRatings.batches": (
            lambda **own: next(iter(ratings().batches(**own)), None),
            {"batch_size": 8, "rank": 0, "world_size": 1, "shuffle": True, "seed": 0, "drop_last": False},
        ),
        "EmbeddingComputeKernel": (rl.sharding.EmbeddingComputeKernel, {"value": "fused"}),
        "ShardingType": (rl.sharding.ShardingType, {"value": "row_wise"}),
        "EmbeddingModuleShardingPlan": (
            lambda entries: str(
                rl.ShardingPlan({"": rl.sharding.EmbeddingModuleShardingPlan(entries)}).validate([bags()], 2)
            ),
            {"entries": {"t": rl.ParameterSharding("custom", shards=shards)}},
        ),
        "ParameterConstraints": (
            lambda **own: planned(
                rl.EmbeddingShardingPlanner(rl.Topology(2), 8, constraints={"t": rl.ParameterConstraints(**own)})
            ),
            {
                "sharding_types": ["row_wise"],
                "compute_kernels": ["fused"],
                "min_partition": 4,
                "pooling_factors": [1.0],
                "num_poolings": [1.0],
                "batch_sizes": [8],
                "is_weighted": False,
                "colocate_with": [],
                "device_group": "cpu",
                "ranks": [0],
                "route": "direct",
            },
        ),
        "ParameterSharding": (
            lambda **own: rl.ShardingPlan({"": {"t": rl.ParameterSharding(**own)}}).resolved([bags()], 2).to_json(),  # type: ignore[dict-item]
            {
                "sharding_type": "custom",
                "compute_kernel": "fused",
                "ranks": [0, 1],
                "shards": shards,
                "route": "direct",
            },
        ),
        "Shard": (
            lambda **own: rl.sharding.tiling([rl.Shard(**own)])(bags(), rl.Topology(2)),
            {"rank": 0, "rows": (0, 10), "cols": (0, 4)},
        ),
        "PlanError": (rl.PlanError, {}),
        "ShardingPlan": (lambda plan: rl.ShardingPlan(plan).resolved([bags()], 2).show(), {"plan": plan().plan}),
        "ShardingPlan.resolved": (plan().resolved, {"tables": [bags()], "world_size": 2, "local_world_size": 2}),
        "ShardingPlan.validate": (plan().validate, {"tables": [bags()], "world_size": 2}),
        "ShardingPlan.pairs": (plan().pairs, {"tables": [bags()]}),
        "ShardingPlan.with_route": (plan().with_route, {"route": "direct"}),
        "ShardingPlan.explain": (lambda **own: str(made().explain(**own)), {"table": "t", **asked}),
        "ShardingPlan.diff": (lambda **own: str(made().diff(**own)), {"other": plan(), **asked}),
        "ShardingPlan.why_not": (lambda **own: str(made().why_not(**own)), {"constraints": {"t": "row_wise"}, **asked}),
        "ShardingPlan.to_script": (lambda **own: made().to_script(**own), {"model": None, **asked}),
        "ShardingPlan.from_json": (rl.ShardingPlan.from_json, {"text": plan().to_json()}),
        "ShardingPlan.get_plan_for_module": (plan().get_plan_for_module, {"module_path": ""}),
        "Topology": (
            rl.Topology,
            {
                "world_size": 2,
                "compute_device": "cpu",
                "hbm_cap": 1 << 30,
                "ddr_cap": 1 << 30,
                "local_world_size": 2,
                "intra_host_bw": 1e6,
                "reserve_fraction": 0.1,
                "update_cost": {"exact_sgd": 1.0},
                "cores_per_host": 2,
                "device_groups": {"fast": [0]},
            },
        ),
        "Topology.node_of": (rl.Topology(2).node_of, {"rank": 0}),
        "apply_to_all": (rl.sharding.apply_to_all, {"module": ebc(), "parameter_sharding_generator": rl.row_wise()}),
        "construct_module_sharding_plan": (
            rl.sharding.construct_module_sharding_plan,
            {
                "module": ebc(),
                "per_param_sharding": {"t": rl.row_wise()},
                "local_size": 2,
                "world_size": 2,
                "device_type": "cpu",
            },
        ),
        "table_wise": cut_call(rl.table_wise, rank=1, compute_kernel="fused"),
        "row_wise": cut_call(rl.row_wise, boundaries=[4], ranks=[0, 1], compute_kernel="fused"),
        "row_wise.sizes": cut_call(rl.row_wise, sizes=[4, 6], ranks=[0, 1]),
        "row_wise.sizes_placement": cut_call(rl.row_wise, sizes_placement=([4, 6], "cpu"), ranks=[0, 1]),
        "row_wise.num_buckets": cut_call(rl.row_wise, num_buckets=5, ranks=[0, 1]),
        "column_wise": cut_call(rl.column_wise, ranks=[0, 1], size_per_rank=[2, 2], compute_kernel="fused"),
        "table_row_wise": cut_call(rl.table_row_wise, host_index=1, compute_kernel="fused"),
        "table_column_wise": cut_call(rl.table_column_wise, host_index=1, size_per_rank=[2, 2], compute_kernel="fused"),
        "grid_shard": cut_call(rl.grid_shard, host_indexes=[0], compute_kernel="fused"),
        "flex_shard": cut_call(rl.flex_shard, hot_rows=4, ranks=[0, 1], compute_kernel="fused"),
        "RowShares": (rl.sharding.RowShares, {"edges": (0.0, 5.0, 10.0), "shares": (0.0, 0.9, 1.0)}),
        "RowShares.of_ids": (rl.sharding.RowShares.of_ids, {"batches": [[1, 1, 2]], "num_embeddings": 10}),
        "RowShares.zipf": (rl.sharding.RowShares.zipf, {"num_embeddings": 10, "alpha": 1.1}),
        "RowShares.share": (rl.sharding.RowShares.zipf(10, 1.1).share, {"start": 0, "end": 5}),
        "RowShares.rows_for": (rl.sharding.RowShares.zipf(10, 1.1).rows_for, {"share": 0.5}),
        "RowShares.distinct": (rl.sharding.RowShares.zipf(10, 1.1).distinct, {"start": 0, "end": 5, "num_ids": 10}),
        "RowShares.sizes": (rl.sharding.RowShares.zipf(10, 1.1).sizes, {"count": 2, "first_row": 1, "evenness": 0.5}),
        "data_parallel": cut_call(rl.data_parallel),
        "tiling": cut_call(rl.sharding.tiling, rects=shards, compute_kernel="fused"),
        "EmbeddingShardingPlanner": (
            lambda **own: planned(rl.EmbeddingShardingPlanner(**own)),
            {
                "topology": rl.Topology(2),
                "batch_size": 8,
                "constraints": table,
                "workload": rl.Workload(8),
                "local_search_passes": 1,
                "route": "direct",
                "keep_search": True,
            },
        ),
        "EmbeddingShardingPlanner.plan": (rl.EmbeddingShardingPlanner(rl.Topology(2)).plan, {"module": ebc()}),
        "EmbeddingShardingPlanner.plan_tables": (
            rl.EmbeddingShardingPlanner(rl.Topology(2)).plan_tables,
            {"tables": [bags()]},
        ),
        "Estimate": (lambda: rl.estimate(plan(), [bags()], rl.Topology(2)), {}),
        "Workload": (
            lambda **own: rl.estimate(plan(), [bags()], rl.Topology(2), rl.Workload(**own)),
            {
                "batch_size": 8,
                "pooling_factors": {"f": 2.0},
                "unique_fraction": 0.5,
                "zipf_alpha": 1.1,
                "optimizer": "exact_sgd",
                "weighted": True,
                "dense_parameters": 10,
                "dense_flops_per_sample": 3.0,
                "dense_bytes_per_parameter": 8.0,
                "access": rl.planner.AccessProfile((1.0,), (2.0,)),
                "codecs": "fp16/bf16",
                "pipeline": "prefetch",
                "dense_features": 3,
                "dense_launches": 7,
                "index_dedup": True,
            },
        ),
        "AccessProfile": (rl.planner.AccessProfile, {"uses": (1.0,), "rows": (2.0,), "pooling_factor": 2.0}),
        "AccessProfile.of_ids": (rl.planner.AccessProfile.of_ids, {"batches": [np.arange(3)]}),
        "AccessProfile.distinct": (
            rl.planner.AccessProfile((1.0,), (2.0,)).distinct,
            {"num_ids": 1.0, "num_embeddings": 2.0},
        ),
        "AccessProfile.hottest": (rl.planner.AccessProfile((1.0,), (2.0,)).hottest, {"rows": 1.0}),
        "Topology.preset": (
            lambda **own: rl.Topology.preset(**own),
            {"name": "h100", "world_size": 8, "local_world_size": 8, "hbm_cap": 9},
        ),
        "preset_table": (rl.sharding.preset_table, {"name": "h100"}),
        "read_tables": (read_written, {"path": "t.csv"}),
        "read_source": (read_source, {"source": "tests.cli.models:dlrm"}),
        "read_constraints": (wishes_read, {"path": "wishes.json", "tables": ["t"]}),
        "Workload.measured": (
            rl.Workload.measured,
            {"batches": [batch()], "tables": [bags()]},
        ),
        "Workload.pooling_factor": (rl.Workload().pooling_factor, {"feature": "f"}),
        "Workload.knows_repeats": (rl.Workload().knows_repeats, {"table": "t"}),
        "estimate": (
            rl.estimate,
            {
                "plan": plan(),
                "tables": [bags()],
                "topology": rl.Topology(2),
                "workload": rl.Workload(8),
                "constraints": table,
            },
        ),
        "plan": (
            lambda tables, topology, **own: rl.plan(tables, topology, **own),
            {
                "tables": [bags()],
                "topology": rl.Topology(2),
                "workload": rl.Workload(8),
                "constraints": {bags().name: "row_wise"},
            },
        ),
        "sweep": (
            lambda **own: str(rl.sweep(**own)),
            {
                "tables": [bags()],
                "workload": rl.Workload(8),
                "topology": ["h100"],
                "world_size": [8],
                "batch_size": [8],
                "global_batch_size": None,
                "hbm_cap": [10**9],
                "codecs": ["fp16"],
                "optimizer": ["exact_sgd"],
                "pipeline": ["none"],
                "sharding_group_size": [4],
                "sync_every": 2,
                "use_inter_host_allreduce": False,
                "constraints": table,
                "solver": "greedy",
                "local_search_passes": 1,
                "explain": False,
                "progress": False,
            },
        ),
        "Sweep.pareto": (
            lambda objective: rl.sweep([bags()], world_size=2).pareto(objective),
            {"objective": "step_ms"},
        ),
        "tier_shares": (
            rl.planner.tier_shares,
            {
                "plan": plan(),
                "tables": [bags()],
                "topology": rl.Topology(2),
                "workload": rl.Workload(8),
                "constraints": table,
            },
        ),
        "compare_servers": (
            rl.planner.compare_servers,
            {
                "tables": [bags()],
                "workload": rl.Workload(8),
                "workers": [2, 4],
                "workers_per_server": 4.0,
                "bandwidth": 1e6,
                "id_bytes": 8,
            },
        ),
        "mlperf_example": (rl.planner.mlperf_example, {"world_sizes": [8]}),
        "mlperf_dlrm_dcnv2_tables": (rl.planner.mlperf_dlrm_dcnv2_tables, {}),
        "mlperf_dlrm_dcnv2_workload": (rl.planner.mlperf_dlrm_dcnv2_workload, {"batch_size": 8, "zipf_alpha": 1.0}),
        "CommType": (rl.comm.CommType, {"value": "fp16"}),
        "QCommsConfig": (
            lambda **own: rl.comm.get_qcomm_codecs_registry(rl.comm.QCommsConfig(**own)),
            {
                "forward_precision": rl.comm.CommType.FP16,
                "backward_precision": rl.comm.CommType.BF16,
                "forward_loss_scale": 2.0,
                "backward_loss_scale": 2.0,
            },
        ),
        "codec_error": (rl.comm.codec_error, {"codec": rl.comm.CommType.INT8, "tensor": torch.ones(2, 4)}),
        "get_qcomm_codecs_registry": (
            rl.comm.get_qcomm_codecs_registry,
            {"qcomms_config": rl.comm.QCommsConfig(), "comm_ops": None, "device": "cpu"},
        ),
        "DistributedModelParallel": (
            rl.DistributedModelParallel,
            {
                "module": ebc(),
                "env": rl.distributed.ShardingEnv.from_local(1, 0),
                "device": "cpu",
                "plan": plan(),
                "sharders": [rl.distributed.EmbeddingBagCollectionSharder()],
            },
        ),
        "DistributedModelParallel.reshard": (
            lambda **own: dmp().reshard(**own),
            {"plan": plan(), "max_extra_bytes": None, "optimizers": [], "park_dir": None},
        ),
        "DistributedModelParallel.forward": (lambda features: dmp()(features), {"features": batch()}),
        "DistributedModelParallel.load_state_dict": (
            lambda state_dict: loaded(dmp(), state_dict),
            {"state_dict": dmp().state_dict()},
        ),
        "EmbeddingBagCollectionSharder": (
            lambda **own: trained(rl.distributed.EmbeddingBagCollectionSharder(**own)),
            {
                "fused_params": {"learning_rate": 0.1},
                "qcomm_codecs_registry": rl.comm.get_qcomm_codecs_registry(rl.comm.QCommsConfig()),
                "backend": "native",
                "out_of_range": "error",
            },
        ),
        "EmbeddingBagCollectionSharder.fused_params": (
            lambda **own: trained(rl.distributed.EmbeddingBagCollectionSharder(own)),
            {"optimizer": "adam", "learning_rate": 0.1, "eps": 0.1, "beta1": 0.5, "weight_decay": 0.1},
        ),
        "EmbeddingCollectionSharder": (
            rl.distributed.EmbeddingCollectionSharder,
            {"fused_params": {"learning_rate": 0.1}, "backend": "native", "out_of_range": "error"},
        ),
        "ShardingEnv": (rl.distributed.ShardingEnv, {"world_size": 1, "rank": 0}),
        "ShardingEnv.from_local": (rl.distributed.ShardingEnv.from_local, {"world_size": 1, "rank": 0}),
        "train.train_epochs": (
            lambda **own: train_epochs(**own),
            {
                "model": clicks(),
                "dataset": ratings(),
                "optimizer": None,
                "epochs": 1,
                "batch_size": 40,
                "shuffle": True,
                "seed": 0,
                "drop_last": False,
                "device": "cpu",
                "group": None,
                "on_step": None,
            },
        ),
        "train.evaluate": (
            lambda **own: evaluate(**own),
            {"model": clicks(), "dataset": ratings(), "batch_size": 40, "device": "cpu", "group": None},
        ),
        "shard_for_inference": (
            rl.shard_for_inference,
            {"model": ebc(), "plan": None, "devices": ["cpu"], "output_device": "cpu", "checkpoint": None},
        ),
        "load_pretrained": (
            rl.distributed.load_pretrained,
            {"model": ebc(), "tables": {"t": torch.ones(10, 4)}, "cast": True},
        ),
        "load_pretrained.tables": (
            lambda t: rl.distributed.load_pretrained(ebc(), {"t": t}),
            {"t": torch.ones(10, 4)},
        ),
        "save_checkpoint": (
            lambda **own: in_folder(lambda folder: rl.save_checkpoint(folder / "run", **own)),
            {"model": ebc(), "optimizer": None, "extra": {"epoch": 1}},
        ),
        "async_save_checkpoint": (
            lambda **own: in_folder(
                lambda folder: rl.distributed.async_save_checkpoint(folder / "run", **own).result()
            ),
            {"model": ebc(), "optimizer": None, "extra": {"epoch": 1}},
        ),
        "load_checkpoint": (
            lambda **own: in_folder(lambda folder: saved_and_loaded(folder / "run", **own)),
            {"model": ebc(), "optimizer": None, "optimizer_state": True},
        ),
        "load_checkpoint.path": (
            lambda path: rl.load_checkpoint(path, ebc()) if path != "right" else None,
            {"path": "right"},
        ),
        "DefaultDataParallelWrapper": (
            rl.distributed.DefaultDataParallelWrapper,
            {
                "bucket_cap_mb": 25,
                "static_graph": False,
                "find_unused_parameters": None,
                "allreduce_comm_precision": None,
                "params_to_ignore": None,
                "ddp_kwargs": None,
            },
        ),
        "DMPCollection": (
            rl.distributed.DMPCollection,
            {
                "module": ebc(),
                "device": "cpu",
                "plan": plan(),
                "world_size": 1,
                "sharding_group_size": 1,
                "global_pg": None,
                "sharding_strategy": "default",
                "node_group_size": 1,
                "sharders": [rl.distributed.EmbeddingBagCollectionSharder()],
                "use_inter_host_allreduce": False,
                "custom_all_reduce": None,
            },
        ),
        "train.TrainPipelineBase": (closed(pipelines.TrainPipelineBase), piped),
        "train.TrainPipelineSparseDist": (
            closed(pipelines.TrainPipelineSparseDist),
            {**piped, "execute_all_batches": True, "apply_jit": False, "pipeline_postproc": True},
        ),
        "train.TrainPipelineSemiSync": (
            closed(pipelines.TrainPipelineSemiSync),
            {**piped, "start_batch": 3, "stash_gradients": False, "strict": False},
        ),
        "train.EvalPipelineSparseDist": (
            closed(pipelines.EvalPipelineSparseDist),
            {name: piped[name] for name in ("model", "optimizer", "device", "threads")},
        ),
        "train.TrainPipelineSparseDist.progress": (
            lambda dataloader_iter: closed(pipelines.TrainPipelineSparseDist)(**piped, dataloader_iter=dataloader_iter),
            {"dataloader_iter": iter([])},
        ),
        "train.compile_dense": (lambda model: compile_dense(model, backend="eager"), {"model": nn.Linear(2, 1)}),
        "train.events_from_chrome_trace": (
            events_from_chrome_trace,
            {"trace": {"traceEvents": [{"ph": "X", "name": "## forward 1 ##", "ts": 1.0}]}, "rank": 0},
        ),
        "train.auc": (auc, {"scores": torch.tensor([0.1, 0.9]), "labels": torch.tensor([0, 1])}),
        "train.log_loss": (log_loss, {"scores": torch.tensor([0.1, 0.9]), "labels": torch.tensor([0, 1])}),
        "train.auc of weights": (auc, {**SCORED, "weights": torch.ones(2)}),
        "train.calibration": (metrics.calibration, SCORED),
        "train.grouped_auc": (metrics.grouped_auc, {**SCORED, "groups": torch.zeros(2, dtype=torch.int64)}),
        "train.ndcg": (metrics.ndcg, {**SCORED, "groups": torch.zeros(2, dtype=torch.int64), "k": 1}),
        "train.recall_at_k": (metrics.recall_at_k, {**SCORED, "groups": torch.zeros(2, dtype=torch.int64), "k": 1}),
        "train.NEMetric": (
            lambda **own: metrics.NEMetric(**own).compute(),
            {"world_size": 1, "my_rank": 0, "batch_size": 2, "tasks": [metrics.DefaultTaskInfo], "window_size": 4},
        ),
        "train.RecallSessionMetric": (lambda **own: metrics.RecallSessionMetric(**own).compute(), {"k": 2}),
        "train.GAUCMetric.update": (
            lambda **own: metrics.GAUCMetric().update(**own),
            {
                "predictions": torch.tensor([0.1, 0.9]),
                "labels": torch.tensor([0, 1]),
                "weights": torch.ones(2),
                "groups": torch.zeros(2, dtype=torch.int64),
            },
        ),
        "train.NEMetric.load_state_dict": (
            lambda **own: metrics.NEMetric().load_state_dict(**own),
            {"state": metrics.NEMetric().state_dict()},
        ),
        "train.ThroughputMetric": (
            metrics.ThroughputMetric,
            {"batch_size": 2, "world_size": 1, "window_seconds": 3, "warmup_steps": 0},
        ),
        "train.RecMetricModule.update": (
            lambda **own: metrics.RecMetricModule(2, 1, rec_metrics=[metrics.AUCMetric()]).update(**own),
            {"model_out": {"prediction": torch.tensor([0.1, 0.9]), "label": torch.tensor([0, 1])}},
        ),
        "TrainConfig": (rl.train.TrainConfig, small_run()),
        "run_training": (
            lambda config: rl.train.run_training(config).step,
            {"config": rl.train.TrainConfig.model_validate(small_run())},
        ),
        "read_config": (config_read, {"path": "run.json"}),
        "export_run": (
            lambda **own: in_folder(lambda folder: rl.train.export_run(**{"folder": folder, **own})),
            {
                "config": rl.train.TrainConfig.model_validate(small_run()),
                "plan": None,
                "topology": rl.Topology(2),
            },
        ),
        "train.normalized_entropy": (
            normalized_entropy,
            {"scores": torch.tensor([0.1, 0.9]), "labels": torch.tensor([0, 1])},
        ),
    }


#: what the caller's own code raises when it is called stays as it is
OPEN = {
    "BatchLoader": {"transform"},
    "preprocess_criteo": {"on_progress"},
    "sweep": {"progress"},
    "train.train_epochs": {"model", "on_step"},
    "train.evaluate": {"model"},
}


@pytest.mark.gate
@every(calls().items(), lambda entry: entry[0])
def test_a_wrong_argument_is_a_value_error(entry: tuple[str, Any]) -> None:
    name, (call, given) = entry
    fresh = copy.deepcopy if "Optimizer" in name else dict  # their steps change what is given
    call(**fresh(given))
    for argument in given.keys() - OPEN.get(name, set()):
        for junk in JUNK:
            with contextlib.suppress(ValueError):  # anything else fails the test
                call(**{**fresh(given), argument: junk})


def test_every_public_name_is_swept_here_or_where_it_lives() -> None:
    elsewhere = {"MovieLens"}  # files
    rooms = ("recshard_lab.sparse", "recshard_lab.launcher", "recshard_lab.lab")  # in tests/ of the same name
    named = {name: getattr(getattr(rl, name), "__module__", "") for name in dir(rl) if callable(getattr(rl, name))}
    ours = {name for name, module in named.items() if not module.startswith(rooms) and "ipython" not in name}
    assert len(ours) > 30
    assert ours - elsewhere - {name.partition(".")[0] for name in calls()} == set()


def test_a_job_may_name_functions_that_look_at_their_arguments() -> None:
    table_wise, construct, model = (
        rl.table_wise,
        rl.sharding.construct_module_sharding_plan,
        rl.FusedEmbeddingBagCollection.forward,
    )
    assert encode(lambda: (table_wise, construct, model))
