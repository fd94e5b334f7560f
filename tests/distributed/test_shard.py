"""Collections sharded without the wrapper: filled, waited for, stepped by their own fused optimizer."""

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from recshard_lab import (
    DistributedModelParallel,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    KeyedJaggedTensor,
)
from recshard_lab.distributed import (
    EmbeddingBagCollectionSharder,
    LazyNoWait,
    ShardingEnv,
    shard,
)
from recshard_lab.sharding import construct_module_sharding_plan, row_wise, table_wise

SIZES = {"one": (12, 4), "two": (9, 8)}


def tables(kind: type = EmbeddingBagConfig) -> list[Any]:
    return [kind(name=n, num_embeddings=e, embedding_dim=d, feature_names=[n]) for n, (e, d) in SIZES.items()]


def batch(rank: int = 0) -> KeyedJaggedTensor:
    ids = torch.tensor([0, 3, 11, 8, 1, 1]) if rank == 0 else torch.tensor([5, 2, 0, 7, 4, 4])
    return KeyedJaggedTensor(["one", "two"], ids, lengths=torch.tensor([2, 1, 1, 2]))


def collection(seed: int = 0) -> EmbeddingBagCollection:
    torch.manual_seed(seed)
    return EmbeddingBagCollection(tables())


def a_sharded_twin(rank: int) -> dict[str, Any]:
    ours = collection(seed=0)
    given = collection(seed=rank)  # rank 0's weights are everybody's
    env = ShardingEnv.default()
    plan = construct_module_sharding_plan(given, {"one": row_wise(), "two": table_wise(rank=1)}, world_size=2)
    twin = EmbeddingBagCollectionSharder(fused_params={"learning_rate": 0.5}).shard(given, plan, env)
    out = twin(batch(rank))
    found = {"forward": torch.equal(out.wait().values(), ours(batch(rank)).values()), "type": type(out.wait()).__name__}
    rates = [group["lr"] for group in twin.fused_optimizer.param_groups]
    for group in twin.fused_optimizer.param_groups:
        group["lr"] = 0.25
    twin(batch(rank)).values().sum().backward()
    optimizer = torch.optim.SGD(ours.parameters(), lr=0.25)
    ((ours(batch(0)).values().sum() + ours(batch(1)).values().sum()) / 2).backward()  # the ranks' mean
    optimizer.step()
    after = twin(batch(rank)).values().detach()
    return found | {"rates": rates, "error": float((after - ours(batch(rank)).values()).abs().max())}


def test_a_collection_sharded_by_itself_has_rank_zeros_weights_and_steps_in_backward(two: Any) -> None:
    results = two.run(lambda: a_sharded_twin(torch.distributed.get_rank()))
    for result in results:
        assert result["forward"]
        assert result["type"] == "KeyedTensor"
        assert result["rates"] == [0.5]
        assert result["error"] < 1e-6


@pytest.mark.filterwarnings("ignore:.torch.jit.:DeprecationWarning")  # torch's own, as it is imported
def test_an_optimizer_that_torch_put_into_backward_is_taken_over() -> None:
    from torch.distributed.optim import _apply_optimizer_in_backward

    ebc = copy.deepcopy(collection())
    for parameter in ebc.parameters():
        _apply_optimizer_in_backward(torch.optim.SGD, [parameter], {"lr": 0.75})
    twin = shard(ebc, row_wise())
    assert [group["lr"] for group in twin.fused_optimizer.param_groups] == [0.75]
    before = twin(batch()).values().clone()
    twin(batch()).values().sum().backward()
    assert not torch.equal(twin(batch()).values(), before)


def test_the_dense_part_on_meta_is_drawn_where_it_will_live() -> None:
    ebc = EmbeddingBagCollection(tables(), device="meta")
    dmp = DistributedModelParallel(nn.ModuleDict({"ebc": ebc, "linear": nn.Linear(4, 1, device="meta")}))
    assert not any(parameter.is_meta for parameter in dmp.parameters())
    stubborn = nn.ModuleDict(
        {"ebc": collection(), "own": nn.ParameterList([nn.Parameter(torch.ones(2, device="meta"))])}
    )
    with pytest.raises(ValueError, match=r"'own' \(ParameterList\) is on the meta device"):
        DistributedModelParallel(stubborn)


def dense_later(rank: int) -> tuple[str, bool, bool]:
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(3, 1))
    dmp = DistributedModelParallel(model, init_data_parallel=False)
    before = type(dmp._dmp_wrapped_module).__name__
    dmp.init_data_parallel()
    wrapped = dmp._dmp_wrapped_module
    dmp.init_data_parallel()
    replicated = isinstance(wrapped, DistributedDataParallel) and wrapped.module is dmp.module is model
    return before, replicated, dmp._dmp_wrapped_module is wrapped


def test_the_dense_part_can_be_replicated_later(two: Any) -> None:
    results = two.run(lambda: dense_later(torch.distributed.get_rank()))
    assert results == [("Sequential", True, True)] * 2


def test_a_lazy_result_is_waited_for_when_it_is_used() -> None:
    lazy = LazyNoWait(torch.arange(3.0))
    assert (1 + lazy).tolist() == [1, 2, 3]
    assert torch.cat([lazy, lazy]).shape == (6,)
    assert lazy[1] == 1
    assert len(lazy) == 3
    chained = LazyNoWait(2)
    chained.callbacks.append(lambda value: value + 1)
    assert chained.wait() == chained.wait() == 3
