"""The dense part under FSDP2 trains as under DistributedDataParallel, clips alike, and its states load. 2 ranks."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import recshard_lab
from recshard_lab import DistributedModelParallel, ShardingPlan, row_wise
from recshard_lab.distributed import (
    DataParallelWrapper,
    DefaultDataParallelWrapper,
    EmbeddingBagCollectionSharder,
    FullyShardWrapper,
)
from recshard_lab.optim import CombinedOptimizer, GradientClipping, GradientClippingOptimizer, KeyedOptimizerWrapper
from recshard_lab.sharding import construct_module_sharding_plan, data_parallel
from tests.distributed.test_compile_and_autocast import Model, batch_of

STEPS, MAX_NORM = 3, 0.05


def build(wrapper: DataParallelWrapper, clips: bool, kernel: str = "fused") -> tuple[DistributedModelParallel, Any]:
    torch.manual_seed(torch.distributed.get_rank())  # rank 0's weights must win
    model = Model()
    for parameter in model.over.parameters():
        nn.init.uniform_(parameter, -0.5, 0.5)
    schemes = {"a": row_wise(), "b": data_parallel(), "c": data_parallel(), "d": row_wise()}
    plan = ShardingPlan({"ebc": construct_module_sharding_plan(model.ebc, schemes, world_size=2)})
    sharder = EmbeddingBagCollectionSharder(fused_params={"learning_rate": 0.1})
    dmp = DistributedModelParallel(model, plan=plan, sharders=[sharder], data_parallel_wrapper=wrapper)
    own = {id(parameter) for parameter in dmp.dense_parameters()}
    dense = {name: parameter for name, parameter in dmp.named_parameters() if id(parameter) in own}
    adam = KeyedOptimizerWrapper(dense, lambda params: torch.optim.Adam(params, lr=0.01))
    optimizer: Any = CombinedOptimizer([dmp.fused_optimizer, adam])
    if clips:
        optimizer = GradientClippingOptimizer(optimizer, GradientClipping.NORM, MAX_NORM)
    return dmp, optimizer


def train(dmp: Any, optimizer: Any, steps: range) -> list[float]:
    rank, norms = torch.distributed.get_rank(), []
    for step in steps:
        optimizer.zero_grad()
        dmp(*batch_of(step, rank))[0].backward()
        optimizer.step()
        norms.append(float(getattr(optimizer, "last_total_grad_norm", 0.0)))
    return norms


def trained(wrapper: DataParallelWrapper, clips: bool) -> tuple[dict[str, Tensor], list[float], int]:
    """Weights, norms, and the elements of dense parameters on this rank."""
    dmp, optimizer = build(wrapper, clips)
    norms = train(dmp, optimizer, range(STEPS))
    parameters = [p.to_local() if hasattr(p, "to_local") else p for p in dmp.dense_parameters()]
    stored = sum(p.numel() for p in parameters)
    assert dmp.memory_bytes()["dense"] == 8 * stored  # weights and gradients
    return dmp.full_state_dict(), norms, stored


@pytest.mark.gate
@pytest.mark.parametrize(("modules", "clips"), [([], False), ([nn.Linear], True)], ids=["whole", "by module, clipped"])
def test_weights_are_those_of_distributed_data_parallel(two: Any, modules: list[type], clips: bool) -> None:
    replicated = two.run(trained, DefaultDataParallelWrapper(), clips)
    fully = two.run(trained, FullyShardWrapper(modules), clips)
    truth, norms, _ = replicated[0]
    assert not clips or min(norms) > MAX_NORM
    for weights, own_norms, _ in fully:
        assert own_norms == pytest.approx(norms, rel=1e-4)
        torch.testing.assert_close(weights, truth, rtol=1e-4, atol=1e-5, check_device=False)
    assert sum(stored for *_, stored in fully) == replicated[0][2]


def resumed(form: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Weights after an uninterrupted run, and after one whose second half starts from loaded states."""
    dmp, optimizer = build(FullyShardWrapper(), False)
    train(dmp, optimizer, range(STEPS))
    saved = copy.deepcopy((dmp.state_dict() if form == "sharded" else dmp.full_state_dict(), optimizer.state_dict()))
    train(dmp, optimizer, range(STEPS, 2 * STEPS))
    other, its_optimizer = build(FullyShardWrapper(), False)
    its_optimizer.init_state()
    other.load_state_dict(saved[0])
    its_optimizer.load_state_dict(saved[1])
    train(other, its_optimizer, range(STEPS, 2 * STEPS))
    return dmp.full_state_dict(), other.full_state_dict()


def through_checkpoint(path: str, saves: str, loads: str) -> list[str]:
    """A checkpoint of a model under one wrapper, loaded under another: names of tensors that differ after a step."""
    wrappers = {"fsdp": FullyShardWrapper, "ddp": DefaultDataParallelWrapper}
    one, optimizer = build(wrappers[saves](), False)
    train(one, optimizer, range(STEPS))
    adam = optimizer.optimizers[1][1]
    pending = recshard_lab.distributed.async_save_checkpoint(path, one, adam)
    train(one, optimizer, range(STEPS, STEPS + 1))
    pending.result()
    other, its_optimizer = build(wrappers[loads](), False)
    recshard_lab.load_checkpoint(path, other, its_optimizer.optimizers[1][1])
    train(other, its_optimizer, range(STEPS, STEPS + 1))
    ours, theirs = one.full_state_dict(), other.full_state_dict()
    return [name for name, value in ours.items() if not torch.allclose(value, theirs[name], rtol=1e-4, atol=1e-5)]


@pytest.mark.parametrize(("saves", "loads"), [("fsdp", "ddp"), ("ddp", "fsdp")])
def test_checkpoints_move_between_wrappers(two: Any, tmp_path: Any, saves: str, loads: str) -> None:
    assert two.run(through_checkpoint, str(tmp_path / "checkpoint"), saves, loads) == [[], []]


@pytest.mark.parametrize("form", ["sharded", "whole"])
def test_states_load_into_a_fully_sharded_model(two: Any, form: str) -> None:
    for one, other in two.run(resumed, form):
        for name, value in one.items():
            assert torch.equal(other[name], value), name


def test_arguments_that_the_wrapper_sets_are_refused() -> None:
    with pytest.raises(ValueError, match=r"fully_shard_kwargs contains \['mesh'\], which this wrapper sets"):
        FullyShardWrapper(fully_shard_kwargs={"mesh": None})
    with pytest.raises(ValueError, match="modules must be types of modules, got 'Linear'"):
        FullyShardWrapper(modules=["Linear"])  # type: ignore[list-item]
