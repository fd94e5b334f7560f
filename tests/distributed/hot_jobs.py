"""What ranks run in the tests of hot rows: as plain data in and out."""

from typing import Any

import torch
from torch import Tensor

from recshard_lab import DistributedModelParallel
from recshard_lab.comm import trace
from tests.distributed.jobs import Case, batch_of, sharded_model
from tests.distributed.state_jobs import build, everything, train


def traced_step(case: Case) -> tuple[dict[str, int], int]:
    """Bytes sent to other ranks by label in the second step of a case, and ids looked up for its batch."""
    rank = torch.distributed.get_rank()
    _, model = sharded_model(case)
    for ranks in case.steps[:2]:
        with trace() as traced:
            ctx = model.collection.create_context()
            lookup_input = model.collection.input_dist(ctx, batch_of(ranks[rank])).wait().wait()
            out = model.collection.compute_and_output_dist(ctx, lookup_input)
            outputs = [own.values().sum() for own in out.values()] if isinstance(out, dict) else [out.values().sum()]
            torch.stack(outputs).sum().backward()
    sent: dict[str, int] = {}
    for event in traced.events:
        others = event.bytes_sent - event.bytes_to[rank]
        sent[event.label] = sent.get(event.label, 0) + others
    lanes = len(model.collection.layout.exchanged_features[rank])
    local_inputs = sum(part.ids[2] - part.ids[1] for part in lookup_input.local_batch.replicas)
    return sent, int(lookup_input.counts[:lanes].sum()) + local_inputs


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
