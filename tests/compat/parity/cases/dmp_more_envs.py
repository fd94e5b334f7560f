"""Environments: the devices of one process, process groups, replicas."""

from typing import Any

import torch
import torch.distributed as dist
from torchrec.distributed import DistributedModelParallel, ShardingEnv
from torchrec.distributed.sharding_plan import row_wise
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

from tests.compat.parity.case import case, raised
from tests.compat.parity.cases.dmp import DMP, Model
from tests.compat.parity.sharded_tables import CPU, plan_of

ENV = "torchrec.distributed.ShardingEnv"


@case(ENV)
def devices_of_one_process() -> Any:
    made = [ShardingEnv.from_local(world_size=2, rank=rank) for rank in range(2)]
    return [[env.world_size, env.rank, env.process_group, env.output_dtensor] for env in made]


@case(ENV)
def positional_arguments() -> Any:
    env = ShardingEnv(2, 1, None, True)
    return [env.world_size, env.rank, env.process_group, env.output_dtensor]


@case(ENV)
def tables_over_devices_of_one_process() -> Any:
    env = ShardingEnv.from_local(2, 0)
    model = Model()
    plan = plan_of(model.bags, {name: row_wise() for name in "abcd"})
    return raised(lambda: DistributedModelParallel(model, env, CPU, plan)) != "nothing"


@case(ENV, DMP, ranks=2)
def state_dicts_with_dtensors(rank: int) -> Any:
    env = ShardingEnv(2, rank, dist.group.WORLD, output_dtensor=True)
    model = Model()
    apply_optimizer_in_backward(torch.optim.SGD, model.bags.parameters(), {"lr": 0.1})
    dmp = DistributedModelParallel(model, env, CPU, plan_of(model.bags, {name: row_wise() for name in "abcd"}))
    return {
        name: [type(value).__name__, list(value.size()), list(value.to_local().local_shards()[0].shape)]
        for name, value in sorted(dmp.state_dict().items())
        if name.startswith("bags")
    }
