"""What ranks run in the tests of sharded inference."""

from dataclasses import replace
from typing import Any

import torch

import recshard_lab as rl
from recshard_lab import ShardingPlan, shard_for_inference
from recshard_lab.distributed import ShardedCollection
from tests.distributed import cases
from tests.distributed.jobs import Case, Model, batch_of, sharded_model

SCHEMES = ["row_wise", "table_wise", "column_wise", "data_parallel"]


def case(world: int, sequence: bool = False) -> Case:
    """Tables dealt to four schemes in turn, trained with Adagrad."""
    tables = cases.sequence_tables() if sequence else cases.TABLES
    steps = cases.random_steps(7, tables, world, steps=2, samples=5)
    plan = cases.plan_of(tables, SCHEMES, world).to_json()
    return Case(tables, plan, steps, optimizer="exact_adagrad", sequence=sequence)


def over_ranks(case: Case, folder: str) -> dict[str, Any]:
    """Logits of this rank's batch: of the unsharded model, and served from three sources."""
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    batch = batch_of(case.steps[0][rank])
    dmp, _ = sharded_model(case)
    dmp(batch)[1].sum().backward()
    rl.save_checkpoint(folder, dmp)
    trained = Model(case)
    state = dmp.full_state_dict()
    box = [state]
    torch.distributed.broadcast_object_list(box, src=0)
    trained.load_state_dict(box[0])
    with torch.no_grad():
        found: dict[str, Any] = {"expected": trained(batch)[1].clone()}
    turned = ShardingPlan.from_json(replace_plan(case, world))
    served = {
        "unsharded": shard_for_inference(trained, turned),
        "live": shard_for_inference(dmp, turned),
        "checkpoint": shard_for_inference(Model(case), turned, checkpoint=folder),
        "planned": shard_for_inference(dmp),
    }
    for name, model in served.items():
        found[name] = model(batch)[1].clone()
    sharded = [part for model in served.values() for part in model.modules() if isinstance(part, ShardedCollection)]
    shards = [own for part in sharded for own in part.table_shards().values()]
    found["states"] = sum(len(own.optimizer_tensors()) for own in shards)
    found["gradients"] = [
        name for model in served.values() for name, p in model.named_parameters() if p.grad is not None
    ]
    return found


def packed_over_ranks(case: Case, folder: str) -> dict[str, Any]:
    """Logits of this rank's batch with INT8 tables: unsharded, and served from four sources."""
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    batch = batch_of(case.steps[0][rank])
    dmp, _ = sharded_model(case)
    rl.save_checkpoint(folder, dmp)
    small = rl.quantize_embeddings(dmp, "int8")
    trained = Model(case)
    box = [dmp.full_state_dict()]
    torch.distributed.broadcast_object_list(box, src=0)
    if rank == 0:
        trained.load_state_dict(box[0])  # the rows of other ranks are not read
    turned = ShardingPlan.from_json(replace_plan(case, world))
    served = {
        "live": shard_for_inference(dmp, turned, dtype="int8"),
        "unsharded": shard_for_inference(trained, turned, dtype="int8"),
        "quantized": shard_for_inference(small, turned),
        "checkpoint": shard_for_inference(Model(case), turned, checkpoint=folder, dtype="int8"),
        "planned": shard_for_inference(dmp, dtype="int8"),
    }
    with torch.no_grad():
        found = {name: model(batch)[1].clone() for name, model in {"expected": small, **served}.items()}
    held = served["live"].memory()[0].table_bytes
    return {**found, "bytes": held, "as fp32": shard_for_inference(dmp, turned).memory()[0].table_bytes}


def replace_plan(case: Case, world: int) -> str:
    """The plan of the case with its schemes turned by one table."""
    return cases.plan_of(case.tables, SCHEMES[1:] + SCHEMES[:1], world).to_json()


def devices_of_a_sharded_model(case: Case) -> None:
    dmp, _ = sharded_model(replace(case))
    shard_for_inference(dmp, devices=["cpu"])


def latency(case: Case) -> tuple[float, float, str]:
    """Predicted and measured milliseconds of one call, and where."""
    batch = batch_of(case.steps[0][torch.distributed.get_rank()])
    served = shard_for_inference(Model(case), ShardingPlan.from_json(case.plan))
    (found,) = served.latency(batch, calls=2).plans
    return found.predicted_ms, found.measured_ms, found.devices
