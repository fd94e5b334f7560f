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


def over_ranks(case: Case, folder: str, dtype: str | None = None) -> dict[str, Any]:
    """Logits of this rank's batch: of the unsharded model, and served from several sources."""
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    batch = batch_of(case.steps[0][rank])
    dmp, _ = sharded_model(case)
    dmp(batch)[1].sum().backward()
    rl.save_checkpoint(folder, dmp)
    trained = Model(case)
    box = [dmp.full_state_dict()]
    torch.distributed.broadcast_object_list(box, src=0)
    if dtype is None or rank == 0:  # rows that another rank packs are not read
        trained.load_state_dict(box[0])
    turned = ShardingPlan.from_json(replace_plan(case, world))
    small = dmp if dtype is None else rl.quantize_embeddings(dmp, dtype)
    served = {
        "unsharded": shard_for_inference(trained, turned, dtype=dtype),
        "live": shard_for_inference(dmp, turned, dtype=dtype),
        "quantized": shard_for_inference(small, turned),
        "checkpoint": shard_for_inference(Model(case), turned, checkpoint=folder, dtype=dtype),
        "planned": shard_for_inference(dmp, dtype=dtype),
    }
    with torch.no_grad():
        expected = trained if dtype is None else small
        found: dict[str, Any] = {
            name: model(batch)[1].clone() for name, model in {"expected": expected, **served}.items()
        }
    parts = [part for model in served.values() for part in model.modules() if isinstance(part, ShardedCollection)]
    shards = [own for part in parts for own in part.table_shards().values()]
    named = [pair for model in served.values() for pair in model.named_parameters()]
    found["states"] = sum(len(own.optimizer_tensors()) for own in shards)
    found["gradients"] = [name for name, weight in named if weight.grad is not None]
    found["bytes"] = served["live"].memory()[0].table_bytes
    return found


def replace_plan(case: Case, world: int) -> str:
    """The plan of the case with its schemes turned by one table."""
    return cases.plan_of(case.tables, SCHEMES[1:] + SCHEMES[:1], world).to_json()


def devices_of_a_sharded_model(case: Case) -> None:
    dmp, _ = sharded_model(replace(case))
    shard_for_inference(dmp, devices=["cpu"])
