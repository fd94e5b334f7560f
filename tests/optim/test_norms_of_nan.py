"""A NaN or an infinite gradient on any rank gives the norm and the weights of unsharded torch."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from recshard_lab import DistributedModelParallel, EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from recshard_lab.distributed import EmbeddingBagCollectionSharder
from recshard_lab.optim import CombinedOptimizer, GradientClipping, GradientClippingOptimizer, KeyedOptimizerWrapper
from recshard_lab.sharding import EmbeddingModuleShardingPlan, ShardingPlan, construct_module_sharding_plan, table_wise
from tests.grid import worlds
from tests.launched import launched

INF = float("inf")
VALUES = (float("nan"), INF, -INF)


ranks = launched(worlds(2, 3))


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1)


def tables(count: int) -> EmbeddingBagCollection:
    """One table for each rank."""
    torch.manual_seed(0)
    return EmbeddingBagCollection([EmbeddingBagConfig(3, 2, f"t{n}", feature_names=[f"f{n}"]) for n in range(count)])


def backward(model: nn.Module, count: int, table: int, value: float) -> None:
    """Reads all rows of each table. One number of the gradient of `table` is `value`, all others are 1."""
    features = [f"f{n}" for n in range(count)]
    ids, lengths = torch.arange(3).repeat(count), torch.full((count,), 3)
    output = model(KeyedJaggedTensor(features, ids, lengths=lengths)).values()
    grad = torch.ones_like(output)
    grad[0, 2 * table] = value
    output.backward(grad)


def clipped_tables(kernel: str, norm_type: float) -> list[tuple[float, dict[str, Tensor]]]:
    """Norm and weights after a step, for each value on each rank."""
    count, found = torch.distributed.get_world_size(), []
    for value in VALUES:
        for rank in range(count):
            model = tables(count)
            schemes = {f"t{n}": table_wise(n) for n in range(count)}
            plan = construct_module_sharding_plan(model, schemes, world_size=count)
            on_kernel = {name: replace(own, compute_kernel=kernel) for name, own in plan.items()}
            sharder = EmbeddingBagCollectionSharder({"optimizer": "exact_sgd", "learning_rate": 0.1})
            sharding = ShardingPlan({"": EmbeddingModuleShardingPlan(on_kernel)})
            dmp = DistributedModelParallel(model, plan=sharding, sharders=[sharder])
            parts: list[Any] = [dmp.fused_optimizer]
            if kernel == "dense":
                parts = [KeyedOptimizerWrapper(dict(dmp.named_parameters()), sgd)]
            optimizer = GradientClippingOptimizer(
                CombinedOptimizer(parts), GradientClipping.NORM, 0.5, norm_type, True, param_to_pgs=dmp.param_to_pgs()
            )
            backward(dmp, count, rank, value)
            optimizer.step()
            found.append((float(optimizer.last_total_grad_norm), dmp.full_state_dict()))  # type: ignore[arg-type]
    return found


@pytest.mark.gate
@pytest.mark.parametrize("norm_type", [INF, 2.0])
@pytest.mark.parametrize("kernel", ["fused", "dense"])
def test_of_tables(ranks: Any, kernel: str, norm_type: float) -> None:
    truth = []
    for value in VALUES:
        for rank in range(ranks.world_size):
            model = tables(ranks.world_size)
            backward(model, ranks.world_size, rank, value)
            total = float(nn.utils.clip_grad_norm_(model.parameters(), 0.5, norm_type))
            sgd(model.parameters()).step()
            truth.append((total, {name: weight.clone() for name, weight in model.state_dict().items()}))
    for found in ranks.run(clipped_tables, kernel, norm_type):
        torch.testing.assert_close(found, truth, equal_nan=True)


def linear() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(2, 3, bias=False)


def clipped_dense_part() -> list[tuple[float, Tensor]]:
    """The same for a linear layer under FSDP2, of which each rank has a row or more. The norm is the largest number."""
    from torch.distributed.fsdp import fully_shard

    found, mesh = [], torch.distributed.init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    for value in VALUES:
        for rank in range(mesh.size()):
            layer = fully_shard(linear(), mesh=mesh)
            inner = KeyedOptimizerWrapper(dict(layer.named_parameters()), sgd)
            optimizer = GradientClippingOptimizer(inner, GradientClipping.NORM, 0.5, "inf")
            layer(torch.ones(1, 2)).sum().backward()
            if torch.distributed.get_rank() == rank:
                layer.weight.grad.to_local()[0, 0] = value  # type: ignore[union-attr, operator]
            optimizer.step()
            found.append((float(optimizer.last_total_grad_norm), layer.weight.full_tensor()))  # type: ignore[arg-type, operator]
    return found


def test_of_a_dense_part_under_fsdp2(ranks: Any) -> None:
    truth = []
    for value in VALUES:
        for rank in range(ranks.world_size):
            layer = linear()
            layer(torch.ones(1, 2)).sum().backward()
            assert layer.weight.grad is not None
            first = torch.tensor_split(torch.arange(3), ranks.world_size)[rank][0]  # fully_shard splits rows alike
            layer.weight.grad[first, 0] = value
            total = float(nn.utils.clip_grad_norm_(layer.parameters(), 0.5, INF))
            sgd(layer.parameters()).step()
            truth.append((total, layer.weight.detach()))
    for found in ranks.run(clipped_dense_part):
        torch.testing.assert_close(found, truth, equal_nan=True)
