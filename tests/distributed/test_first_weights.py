"""First weights of a model that each rank builds without a seed: ranks draw different numbers, the model is one."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import recshard_lab as rs
from recshard_lab.distributed import DMPCollection

NAMES = ["a", "b"]


class Model(nn.Module):
    def __init__(self, device: str) -> None:
        super().__init__()
        tables = [rs.EmbeddingBagConfig(40 + k, 8, name=name, feature_names=[name]) for k, name in enumerate(NAMES)]
        self.tables = rs.EmbeddingBagCollection(tables, device=torch.device(device))
        self.top = nn.Linear(16, 4)

    def forward(self, features: rs.KeyedJaggedTensor) -> Tensor:
        return self.top(self.tables(features).values())


def drawn_and_first(scheme: str, device: str, replicas: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The weights that this rank drew, and those that it has in the sharded model: all of the tables' stored here."""
    model = Model(device)
    drawn = {name: weight.detach().clone() for name, weight in model.named_parameters() if not weight.is_meta}
    size = torch.distributed.get_world_size() // replicas
    plan = rs.plan(model, rs.Topology(size), constraints=dict.fromkeys(NAMES, scheme))
    if replicas > 1:
        place = torch.device("cpu")
        dmp: Any = DMPCollection(
            model, place, plan, world_size=size * replicas, sharding_group_size=size, global_pg=None
        )
    else:
        dmp = rs.DistributedModelParallel(model, plan=plan)
    first = {name: weight.detach().clone() for name, weight in dmp.module.top.named_parameters(prefix="top")}
    if scheme == "data_parallel":
        for shards in dmp.table_shards().values():
            (replica,) = shards.local_weights.values()
            first[f"tables.embedding_bags.{shards.config.name}.weight"] = replica.clone()
        return drawn, first
    return drawn, first | {name: weight for name, weight in dmp.full_state_dict().items() if "embedding_bags" in name}


@pytest.fixture(scope="module")
def four() -> Iterator[Any]:
    with rs.launch(4) as launched:
        yield launched


@pytest.mark.gate
@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize(("scheme", "replicas"), [("data_parallel", 1), ("row_wise", 1), ("row_wise", 2)])
def test_replicas_of_a_model_start_with_the_weights_of_rank_0(
    four: Any, scheme: str, replicas: int, device: str
) -> None:
    found = four.run(drawn_and_first, scheme, device, replicas)
    drawn, first = found[0]
    assert len(first) == 4
    assert len(drawn) == (2 if device == "meta" else 4)
    for name, weight in drawn.items():
        assert not torch.equal(found[1][0][name], weight), name  # otherwise the next line would not show a copy
        torch.testing.assert_close(first[name], weight, rtol=0, atol=0, msg=name)
    for _, other in found[1:]:
        for name, weight in first.items():
            torch.testing.assert_close(other[name], weight, rtol=0, atol=0, msg=name)
