"""TorchRec's planner and its estimator, asked from outside: run by TorchRec's own interpreter.

One JSON order on standard input, one JSON answer as the last line of standard output (see `plan_sides.py`).
"""

from __future__ import annotations

import contextlib
import json
import logging
import sys
import time
from collections.abc import Iterator, Mapping
from typing import Any


def enumerated(order: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Every way in which TorchRec would shard each table, with its numbers."""
    from torchrec.distributed.planner.enumerators import EmbeddingEnumerator

    module, sharders, constraints, topology = _problem(order)
    options = EmbeddingEnumerator(topology, order["batch"], constraints).enumerate(module, sharders)
    return [_told(option) for option in options]


def planned(order: Mapping[str, Any]) -> dict[str, Any]:
    """A plan by the planner as it comes, and the seconds that it took."""
    from torchrec.distributed.planner.planners import EmbeddingShardingPlanner
    from torchrec.distributed.planner.types import Stats

    chosen: list[Any] = []

    class Keep(Stats):
        def log(self, *_: Any, best_plan: Any, **__: Any) -> None:
            chosen[:] = best_plan

    module, sharders, constraints, topology = _problem(order)
    planner = EmbeddingShardingPlanner(topology, order["batch"], constraints=constraints, stats=Keep(), debug=False)
    begun = time.perf_counter()
    planner.plan(module, sharders)
    return {"seconds": time.perf_counter() - begun, "tables": [_told(option) for option in chosen]}


def _told(option: Any) -> dict[str, Any]:
    return {
        "table": option.name,
        "scheme": option.sharding_type,
        "kernel": option.compute_kernel,
        "shards": [
            {
                "rank": shard.rank,
                "size": list(shard.size),
                "offset": list(shard.offset),
                "ms": [shard.perf.fwd_compute, shard.perf.fwd_comms, shard.perf.bwd_comms, shard.perf.bwd_compute],
                "total_ms": shard.perf.total,
                "bytes": shard.storage.hbm or shard.storage.ddr,
            }
            for shard in option.shards
        ],
    }


def _problem(order: Mapping[str, Any]) -> tuple[Any, Any, Any, Any]:
    import torch
    from torchrec.distributed.embedding import EmbeddingCollectionSharder
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.planner.types import ParameterConstraints, Topology
    from torchrec.modules.embedding_configs import DataType, EmbeddingBagConfig, EmbeddingConfig
    from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection

    pooled, meta = order["pooled"], torch.device("meta")
    kind = EmbeddingBagConfig if pooled else EmbeddingConfig
    tables = [
        kind(
            name=table["name"],
            num_embeddings=table["rows"],
            embedding_dim=table["cols"],
            feature_names=table["features"],
            data_type=DataType(table["data_type"]),
        )
        for table in order["tables"]
    ]
    weighted = {"is_weighted": order["weighted"]} if pooled else {}
    module: Any = torch.nn.Module()
    module.ebc = (EmbeddingBagCollection if pooled else EmbeddingCollection)(tables, device=meta, **weighted)
    for parameter in module.parameters():
        parameter._optimizer_classes = [_optimizer(order["optimizer"])]
    schemes = order.get("schemes")  # that each table may take; left out, those that TorchRec takes by itself
    constraints = {
        table["name"]: ParameterConstraints(pooling_factors=table["pooling"], sharding_types=schemes)
        for table in order["tables"]
    }
    sharder = (EmbeddingBagCollectionSharder if pooled else EmbeddingCollectionSharder)()
    return module, [sharder], constraints, Topology(**order["topology"])


def _optimizer(name: str) -> Any:
    import torch
    from torchrec.optim import RowWiseAdagrad

    return {
        "exact_sgd": torch.optim.SGD,
        "exact_row_wise_adagrad": RowWiseAdagrad,
        "exact_adagrad": torch.optim.Adagrad,
        "adam": torch.optim.Adam,
    }[name]


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    logging.disable(logging.CRITICAL)
    with contextlib.redirect_stdout(sys.stderr):
        yield


def main() -> None:
    """Reads the order, answers."""
    order = json.loads(sys.stdin.read())
    with _quiet():
        answer = {"enumerate": enumerated, "plan": planned}[order["do"]](order)
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
