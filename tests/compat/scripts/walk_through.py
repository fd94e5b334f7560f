"""From one table to a served model with TorchRec: ids, a plan, a sharded module, optimizers, quantization, fx."""

import copy

import torch
import torch.distributed as dist
import torchrec
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import nn
from torch import quantization as quant
from torch.distributed.optim import _apply_optimizer_in_backward as apply_optimizer_in_backward
from torchrec import JaggedTensor, KeyedJaggedTensor, KeyedTensor
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder, ShardedEmbeddingBagCollection
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
from torchrec.distributed.types import LazyAwaitable, ShardingEnv, ShardingType
from torchrec.fx import Tracer
from torchrec.modules.embedding_configs import QuantConfig
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.quant.embedding_modules import EmbeddingBagCollection as QuantEmbeddingBagCollection
from torchrec.quant.embedding_modules import quant_prep_enable_quant_state_dict_split_scale_bias_for_types

BAGS = torchrec.EmbeddingBagCollection


def spread(weight: torch.Tensor) -> None:
    with torch.no_grad():
        weight.copy_(torch.sin(torch.arange(weight.numel()) * 0.7).view_as(weight) / 3)


def tables() -> list[torchrec.EmbeddingBagConfig]:
    return [
        torchrec.EmbeddingBagConfig(
            name=f"{name}_table", embedding_dim=16, num_embeddings=rows, feature_names=[name], init_fn=spread
        )
        for name, rows in (("product", 64), ("user", 48))
    ]


class Ones(LazyAwaitable[torch.Tensor]):
    """A tensor that is made when it is read."""

    def __init__(self, size: list[int]) -> None:
        super().__init__()
        self.size = size

    def _wait_impl(self) -> torch.Tensor:
        return torch.ones(self.size)


class Served(nn.Module):
    """A model around the tables."""

    def __init__(self, ebc: nn.Module) -> None:
        super().__init__()
        self.ebc = ebc

    def forward(self, kjt: KeyedJaggedTensor) -> KeyedTensor:
        return self.ebc(kjt)


def ids_of(rank: int) -> KeyedJaggedTensor:
    product = JaggedTensor(values=torch.tensor([1, 2, 1, 5, 7 + rank]), lengths=torch.tensor([3, 2]))
    user = JaggedTensor(values=torch.tensor([2, 3, 4 + rank]), lengths=torch.tensor([2, 1]))
    assert product.to_padded_dense(3).shape == (2, 3)
    return KeyedJaggedTensor.from_jt_dict({"product": product, "user": user})


def main() -> None:
    dist.init_process_group(backend="nccl" if torch.cuda.is_available() else "gloo")
    rank, pg = dist.get_rank(), dist.GroupMember.WORLD
    device = torch.device("cuda", rank) if torch.cuda.is_available() else torch.device("cpu")

    def show(values: torch.Tensor) -> None:
        print(f"rank {rank} loss {values.square().mean().item():.6f}", flush=True)

    ebc, kjt = BAGS(device="cpu", tables=tables()), ids_of(rank)
    assert [list(bag.weight.shape) for bag in ebc.embedding_bags.values()] == [[64, 16], [48, 16]]
    assert kjt.keys() == ["product", "user"]
    assert kjt["user"].values().tolist() == [2, 3, 4 + rank]
    pooled = ebc(kjt)
    (regrouped,) = KeyedTensor.regroup([pooled], [["user", "product"]])
    assert torch.equal(regrouped[:, :16], pooled["user"])
    show(pooled.values())

    sharder = EmbeddingBagCollectionSharder(fused_params={"optimizer": EmbOptimType.EXACT_SGD, "learning_rate": 0.1})
    topology = Topology(world_size=dist.get_world_size(), compute_device=device.type)
    options = EmbeddingEnumerator(topology=topology, batch_size=2).enumerate(ebc, [sharder])
    assert {option.name for option in options} == {"product_table", "user_table"}
    limit = ParameterConstraints(sharding_types=[ShardingType.TABLE_WISE.value], compute_kernels=["fused"])
    planner = EmbeddingShardingPlanner(topology=topology, constraints={"product_table": limit, "user_table": limit})
    plan = planner.collective_plan(ebc, [sharder], pg)
    env = ShardingEnv.from_process_group(pg)
    sharded = sharder.shard(copy.deepcopy(ebc), plan.plan[""], env, device)
    assert isinstance(sharded, ShardedEmbeddingBagCollection)
    assert len(sharded._lookups) == len(sharded._output_dists) == 1
    assert not dict(in_backward_optimizer_filter(sharded.named_parameters()))
    output = sharded(kjt.to(device))
    assert isinstance(output, LazyAwaitable)
    looked_up = output.wait().values()
    torch.testing.assert_close(looked_up, pooled.values().to(device))
    torch.mul(Ones([1]).to(device), looked_up).sum().backward()
    show(sharded(kjt.to(device)).values())

    own = copy.deepcopy(ebc)
    apply_optimizer_in_backward(torch.optim.SGD, own.parameters(), {"lr": 0.02})
    model = DistributedModelParallel(own, device=device, plan=planner.collective_plan(own, [sharder], pg))
    assert sorted(model.state_dict()) == sorted(ebc.state_dict())
    for _ in range(2):
        loss = model(kjt.to(device)).wait().values().square().sum()
        loss.backward()
    show(model(kjt.to(device)).wait().values())

    served = Served(ebc)
    config = QuantConfig(
        activation=quant.PlaceholderObserver.with_args(dtype=torch.float32),
        weight=quant.PlaceholderObserver.with_args(dtype=torch.float16),
    )
    quant_prep_enable_quant_state_dict_split_scale_bias_for_types(served, [BAGS])
    small = quant.quantize_dynamic(
        served, qconfig_spec={BAGS: config}, mapping={BAGS: QuantEmbeddingBagCollection}, inplace=False
    )
    assert {buffer.element_size() for name, buffer in small.named_buffers() if name.endswith("weight")} == {1}
    show(small(kjt).values())
    graph = Tracer(leaf_modules=["IntNBitTableBatchedEmbeddingBagsCodegen", "ComputeKJTToJTDict"]).trace(small)
    show(torch.fx.GraphModule(small, graph)(kjt).values())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
