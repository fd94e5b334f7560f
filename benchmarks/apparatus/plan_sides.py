"""One planning problem put to TorchRec's planner in its own interpreter, and its plan in our terms."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from typing import Any

from benchmarks.apparatus.environments import with_checkout
from recshard_lab.embedding.configs import BaseEmbeddingConfig
from recshard_lab.planner import Workload
from recshard_lab.planner.workload import is_pooled
from recshard_lab.sharding import EmbeddingModuleShardingPlan, ParameterSharding, Shard, ShardingPlan, Topology

__all__ = ["NoPlan", "asked", "plan_of", "put_to_torchrec"]

TOPOLOGY = (
    "world_size",
    "compute_device",
    "hbm_cap",
    "ddr_cap",
    "local_world_size",
    "hbm_mem_bw",
    "ddr_mem_bw",
    "intra_host_bw",
    "inter_host_bw",
)


class NoPlan(RuntimeError):
    """TorchRec returned no plan: it failed, or took too long."""


def asked(do: str, tables: Sequence[BaseEmbeddingConfig], topology: Topology, workload: Workload) -> dict[str, Any]:
    """The order for `plan_theirs`.

    Args:
        do: "plan", or "enumerate": every option of every table with its numbers.
        tables: all pooled, or none of them.
    """
    return {
        "do": do,
        "batch": workload.batch_size,
        "weighted": workload.weighted,
        "pooled": is_pooled(tables[0]),
        "optimizer": workload.optimizer,
        "topology": {name: getattr(topology, name) for name in TOPOLOGY},
        "tables": [
            {
                "name": table.name,
                "rows": table.num_embeddings,
                "cols": table.embedding_dim,
                "data_type": table.data_type.value,
                "features": table.feature_names,
                "pooling": [workload.pooling_factor(feature) for feature in table.feature_names],
            }
            for table in tables
        ],
    }


def put_to_torchrec(python: str, order: dict[str, Any], seconds: float) -> Any:
    """The answer of `plan_theirs`.

    Raises:
        NoPlan: none in so many seconds (its imports included), or an error; the message carries its last line.
    """
    command = [python, "-m", "benchmarks.apparatus.plan_theirs"]
    try:
        done = subprocess.run(
            command,
            input=json.dumps(order),
            capture_output=True,
            text=True,
            timeout=seconds,
            env=with_checkout(),
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise NoPlan(f"no plan in {seconds:g} s") from None
    if done.returncode:
        raise NoPlan((done.stderr.strip().splitlines() or ["it ended without a message"])[-1])
    return json.loads(done.stdout.strip().splitlines()[-1])


def plan_of(entries: Sequence[dict[str, Any]]) -> ShardingPlan:
    """The plan among the answer's "tables"; shards without rows are left out."""
    tables = {}
    for one in entries:
        shards = [
            Shard(shard["rank"], (row, row + rows), (col, col + cols))
            for shard in one["shards"]
            for (row, col), (rows, cols) in [(shard["offset"], shard["size"])]
            if rows * cols
        ]
        tables[one["table"]] = ParameterSharding(one["scheme"], one["kernel"], shards=shards)
    return ShardingPlan({"": EmbeddingModuleShardingPlan(tables)})
