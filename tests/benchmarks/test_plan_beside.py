"""Both planners side by side: what is compared, and what is said where there is nothing to compare."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.apparatus import plan_beside
from benchmarks.apparatus.plan_sides import plan_of
from benchmarks.plan import fitting
from recshard_lab.planner import estimate

TABLES, TOPOLOGY, LOAD = fitting(5, 2, 0)


def found(longer: float = 1.0, kernel: str = "fused") -> dict[str, Any]:
    """An answer as TorchRec's side gives it: every table whole on rank 0, in `longer` times the milliseconds."""
    answer: dict[str, Any] = {"seconds": 1.5, "tables": []}
    for table in TABLES:
        size = [table.num_embeddings, table.embedding_dim]
        shard = {"rank": 0, "size": size, "offset": [0, 0]}
        one = {"table": table.name, "scheme": "table_wise", "kernel": kernel, "shards": [shard]}
        alone = plan_of([{**one, "kernel": "fused"}])
        ms = estimate(alone, [table], TOPOLOGY, LOAD.for_tables([table]), cost_model="torchrec").step_ms
        one["shards"] = [{**shard, "total_ms": ms * longer}, {**shard, "size": [0, 0], "total_ms": 9.0}]
        answer["tables"].append(one)
    return answer


def put(monkeypatch: pytest.MonkeyPatch, answer: dict[str, Any]) -> list[Any]:
    monkeypatch.setattr(plan_beside, "put_to_torchrec", lambda *_: answer)
    return plan_beside.compared("python", "five", TABLES, TOPOLOGY, LOAD, 1.0)


def test_a_figure_is_the_ratio_of_the_steps_that_one_cost_model_predicts(monkeypatch: pytest.MonkeyPatch) -> None:
    by_theirs, by_ours = put(monkeypatch, found())
    for figure, cost_model in ((by_theirs, "torchrec"), (by_ours, "recshard")):
        theirs = estimate(plan_of(found()["tables"]), TABLES, TOPOLOGY, LOAD, cost_model=cost_model).step_ms
        assert figure.beside["TorchRec step ms"] == theirs
        assert figure.value == figure.beside["step ms"] / theirs
        assert figure.value < 0.9  # all tables lay on one rank
        assert figure.beside["TorchRec planned ms"] == 1500
        assert figure.ok


def test_other_numbers_than_ours_end_the_comparison(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RuntimeError, match="TorchRec says"):
        put(monkeypatch, found(longer=1.001))
