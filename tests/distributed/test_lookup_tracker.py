"""Lookups of a sharded model by table, beside what TorchRec's tracker returns (see the parity cases).

`test_delta_tracker` has what the tracker does alike for lookups and for steps.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import recshard_lab as rl
from recshard_lab.distributed import TrackingMode
from recshard_lab.distributed.row_tracker import DeltaStoreTrec, DeltaTrackerConfig, ModelDeltaTracker, UpdateMode


def model(optimizer: Any = torch.optim.SGD, **table: Any) -> Any:
    config: Any = {"name": "t", "num_embeddings": 8, "embedding_dim": 4, "feature_names": ["f"], **table}
    bags = rl.FusedEmbeddingBagCollection([rl.EmbeddingBagConfig(**config)], optimizer, {"lr": 0.1})
    return rl.DistributedModelParallel(nn.ModuleDict({"bags": bags}))


def batch(*ids: int) -> rl.KeyedJaggedTensor:
    return rl.KeyedJaggedTensor(["f"], torch.tensor(ids), lengths=torch.tensor([len(ids)]))


def read(tracker: ModelDeltaTracker, **more: Any) -> list[int]:
    return tracker.get_unique_ids(**more).get("bags.embedding_bags.t", torch.zeros(0)).tolist()


def test_auto_compaction_merges_what_no_consumer_has_read() -> None:
    dmp = model()
    tracker = ModelDeltaTracker(dmp, consumers=["a", "b"], auto_compact=True)
    for ids in ((1, 2), (2, 3)):
        dmp._bare["bags"](batch(*ids))
        tracker.step()
    assert [one.compact for one in tracker.store.per_fqn_lookups["bags.embedding_bags.t"]] == [True]
    assert read(tracker, consumer="a") == [1, 2, 3]
    dmp._bare["bags"](batch(5))
    tracker.step()
    assert read(tracker, consumer="a") == [5]
    assert read(tracker, consumer="b") == [1, 2, 3, 5]
    assert tracker.store.per_fqn_lookups["bags.embedding_bags.t"] == []
    assert tracker.get_unique_ids("b") == {}


def test_what_a_tracker_refuses() -> None:
    dmp = model()
    for settings, says in (
        ({"mode": TrackingMode.MOMENTUM_LAST}, r"reads a buffer of fbgemm's CUDA kernels"),
        ({"mode": TrackingMode.EMBEDDING}, "module 'bags' pools its rows"),
        ({"mode": TrackingMode.ROWWISE_ADAGRAD}, "is not stepped by fused row-wise Adagrad"),
    ):
        with pytest.raises(ValueError, match=says):
            ModelDeltaTracker(dmp, **settings)
    tracker = dmp.init_torchrec_delta_tracker(DeltaTrackerConfig(fqns_to_skip=["other"]))
    with pytest.raises(ValueError, match="a share of the rows is not supported"):
        tracker.get_unique(top_percentage=0.5)
    with pytest.raises(ValueError, match="feature 'g' has no tracked table"):
        tracker.record_ids(rl.KeyedJaggedTensor(["g"], torch.tensor([1]), lengths=torch.tensor([1])))
    with pytest.raises(ValueError, match="an empty range"):
        tracker.compact(2, 2)
    with pytest.raises(ValueError, match="no states, and the store's mode is FIRST"):
        DeltaStoreTrec(UpdateMode.FIRST).append(0, "t", torch.tensor([1]))


def test_copies_are_not_tracked() -> None:
    dmp = model()
    tracker = dmp.init_torchrec_delta_tracker(DeltaTrackerConfig())
    twin = dmp.copy("cpu")
    twin._bare["bags"](batch(3))
    assert twin.get_delta_tracker() is None
    assert read(tracker) == []


def test_a_model_gets_another_tracker_after_a_reshard() -> None:
    dmp = model(embedding_dim=8)
    tracker = dmp.init_torchrec_delta_tracker(DeltaTrackerConfig())
    module_plan = rl.sharding.construct_module_sharding_plan(
        dmp.collections["bags"], {"t": rl.column_wise(ranks=[0, 0])}, world_size=1, device_type="cpu"
    )
    dmp.reshard(rl.ShardingPlan({"bags": module_plan}))
    assert tracker.moved
    later = dmp.init_torchrec_delta_tracker(DeltaTrackerConfig())
    dmp._bare["bags"](batch(3, 3))
    assert read(later) == [3]
