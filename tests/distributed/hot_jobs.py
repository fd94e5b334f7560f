"""What ranks run in the tests of hot rows: as plain data in and out."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from recshard_lab import DistributedModelParallel, EmbeddingBagCollection, EmbeddingBagConfig, ShardingPlan
from recshard_lab.comm import trace
from recshard_lab.distributed.state.checkpoint import load_checkpoint, save_checkpoint
from tests.distributed.jobs import Case, batch_of, sharded_model
from tests.distributed.state_jobs import build, everything, train


@dataclass
class Step:
    """One training step on one rank: bytes sent to other ranks by what they are, and ids looked up for the batch."""

    bytes_sent: dict[str, int]
    looked_up: int


def traced_step(case: Case) -> Step:
    """The second step of a case: forward and backward."""
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    _, model = sharded_model(case)
    for ranks in case.steps[:2]:
        with trace() as traced:
            lookup_input = model.collection.send(batch_of(ranks[rank])).wait()
            out = model.collection.compute_and_output_dist(model.collection.create_context(), lookup_input)
            values = out.values() if not isinstance(out, dict) else [own.values() for own in out.values()]
            (
                values.sum() if isinstance(values, Tensor) else torch.stack([own.sum() for own in values]).sum()
            ).backward()
    sent: dict[str, int] = {}
    for event in traced.events:
        others = event.bytes_sent - event.bytes_to[rank]
        sent[event.label] = sent.get(event.label, 0) + others
    lanes = len(model.collection.layout.exchanged_features[rank])
    local_inputs = sum(part.ids[2] - part.ids[1] for part in lookup_input.local_batch.replicas)
    assert world > 1
    return Step(sent, int(lookup_input.counts[:lanes].sum()) + local_inputs)


def replicas(dmp: DistributedModelParallel) -> dict[str, Tensor]:
    """Weights and fused states of this rank's replicas."""
    found = {}
    for path, collection in dmp.collections.items():
        for name, shards in collection.table_shards().items():
            for part in shards.parts():
                for position, matrix in shards.matrices(part).items():
                    if shards.sharding.replica_flags[position]:
                        rows = shards.sharding.shards[position].rows
                        found[f"{path}.{name}.{part.name}.{rows}"] = matrix.detach().clone()
    return found


def train_save_load(case: Case, folder: str, plans: list[str], kernel: Any = None) -> list[dict[str, Tensor]]:
    """Trains under the case's plan, saves; loads under every plan in turn and trains on.

    Returns:
        Replicas here, then everything, after the load of the last plan and one more step; and the same of a model that
        was never saved.
    """
    half = len(case.steps) // 2
    dmp = build(case)
    dense = torch.optim.Adam(dmp.dense_parameters(), lr=0.01)
    train(dmp, dense, case, case.steps[:half])
    save_checkpoint(f"{folder}/0", dmp, dense)
    for number, plan in enumerate(plans):
        other = build(case, plan)
        other_dense = torch.optim.Adam(other.dense_parameters(), lr=0.5)
        load_checkpoint(f"{folder}/{number}", other, other_dense)
        save_checkpoint(f"{folder}/{number + 1}", other, other_dense)
    train(other, other_dense, case, case.steps[half:])
    train(dmp, dense, case, case.steps[half:])
    return [replicas(other), everything(other), everything(dmp)]


def load_own_state(case: Case) -> tuple[list[str], dict[str, Tensor]]:
    """What is wrong after ``load_state_dict`` of an earlier state, and the replicas then."""
    dmp = build(case)
    dense = torch.optim.SGD(dmp.dense_parameters(), lr=0.1)
    saved = {name: _copied(value) for name, value in dmp.state_dict().items()}
    before = everything(dmp)
    mine = replicas(dmp)
    train(dmp, dense, case, case.steps)
    learned = [name for name, value in replicas(dmp).items() if torch.equal(value, mine[name])]
    dmp.load_state_dict(saved)
    after = everything(dmp)
    return learned + [name for name in before if "/" not in name and not torch.equal(before[name], after[name])], {
        name: value for name, value in replicas(dmp).items() if ".weight." in name
    }


def _copied(value: Any) -> Any:
    import copy

    return copy.deepcopy(value)


def random_weights(plan: str, table: dict[str, Any]) -> dict[str, Tensor]:
    """Replicas of a table that every rank draws by itself."""
    torch.manual_seed(1 + torch.distributed.get_rank())
    config = EmbeddingBagConfig(**table, init_fn=lambda weight: weight.uniform_(-1, 1))
    module = EmbeddingBagCollection([config], device=torch.device("meta"))
    return replicas(DistributedModelParallel(module, plan=ShardingPlan.from_json(plan)))


def over_the_link(case: Case) -> tuple[dict[str, Tensor], dict[str, Tensor], int]:
    """Everything after training as if kernels in the host's memory were apart from the device; as it is; crossings."""
    pin, crossings = torch.Tensor.pin_memory, [0]

    def counted(tensor: Tensor, *_: Any) -> Tensor:
        crossings[0] += 1
        return tensor.clone()

    found = []
    for apart in (True, False):
        dmp = build(case)
        dense = torch.optim.SGD(dmp.dense_parameters(), lr=0.1)
        for collection in dmp.collections.values():
            for group in collection.executor.lookup.groups:
                group.crosses = apart and group.kind.host
        torch.Tensor.pin_memory = counted  # type: ignore[assignment,method-assign]
        try:
            train(dmp, dense, case, case.steps)
        finally:
            torch.Tensor.pin_memory = pin  # type: ignore[method-assign]
        found.append(everything(dmp))
    return found[0], found[1], crossings[0]
