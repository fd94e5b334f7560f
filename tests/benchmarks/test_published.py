"""Published points: every one is cited, every step is derived as stated, and every prediction stays in its band."""

import math
import re
from typing import Any
from urllib.parse import urlparse

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks import published
from benchmarks.apparatus.operators import NO_LAUNCH
from recshard_lab import mlperf
from recshard_lab.embedding import EmbeddingBagConfig
from recshard_lab.models.crossnet import LowRankCrossNet
from recshard_lab.models.dlrm import DenseArch, InteractionArch, OverArch
from tests.grid import NIGHT

ENTRIES = published.content()["points"]
MODELS = published.content()["models"]
RECORDED = published.content()["recorded"]
BATCH = 7  # the only size that is 7
CITATION = re.compile(r"^(https://\S+|arXiv \d{4}\.\d{5}), .+")


def test_at_least_five_points_of_three_sources_are_cited() -> None:
    fused = [entry for entry in ENTRIES if entry["executor"] == "fused"]
    assert len(fused) >= 5
    assert len({"/".join(urlparse(entry["source"]).path.split("/")[:3]) for entry in fused}) >= 3
    assert len({entry["name"] for entry in ENTRIES}) == len(ENTRIES)


def test_every_point_names_its_page_and_every_model_its_source() -> None:
    assert not [own["name"] for own in ENTRIES if not CITATION.match(own["source"])]
    assert not [own["name"] for own in ENTRIES if not MODELS[own["model"]]["source"]]


@pytest.mark.gate
def test_every_prediction_stays_in_its_recorded_band() -> None:
    points = ENTRIES if NIGHT else ENTRIES[::3]
    ratios = {own["name"]: (published.point(own).ratio, RECORDED[own["name"]]) for own in points}
    moved = {name: own for name, own in ratios.items() if not math.isclose(*own, rel_tol=published.MARGIN)}
    assert not moved, "predicted / published, recorded. If the cost model was to change: python -m benchmarks.published"


def test_a_step_follows_from_time_rate_or_log() -> None:
    entry: dict[str, Any] = {"batch_size": 1000, "ranks": 4}
    log = {"eval_stop_ms": [0, 900], "eval_start_ms": [-100, 600], "epoch": [0.0, 1200_000 / published.TRAIN_SAMPLES]}
    for figure in ({"ms": 2.0}, {"samples_per_s": 2_000_000}, {"log": log}):
        assert published.published_ms(entry | {"published": figure}) == pytest.approx(2.0)


def test_the_benchmarks_tables_are_those_of_mlperf() -> None:
    assert tuple(MODELS["dlrm_dcnv2"]["rows"]) == mlperf.ROWS
    assert tuple(MODELS["dlrm_dcnv2"]["ids"]) == mlperf.MULTI_HOT_SIZES


def test_models_have_the_published_tables_and_bytes() -> None:
    for model, tables, gib in (
        *(("synthetic_tiny", 55, 4.2), ("synthetic_medium", 311, 206.2), ("synthetic_jumbo", 1022, 3109.5)),
        *(("criteo_t15", None, 15.6), ("criteo_t3", None, 84.9), ("criteo_t0", None, 421)),
    ):
        found, _ = published.tables_of(MODELS[model])
        assert tables in (None, len(found)), model
        assert sum(table.weight_bytes for table in found) / 2**30 == pytest.approx(gib, abs=0.05 if tables else 0.3), (
            model
        )


def test_dense_parts_have_the_parameters_of_their_layers() -> None:
    model = {"interaction": "dot", "rows": [5, 5], "columns": 4, "dense_features": 3, "bottom": [4], "top": [2, 1]}
    dense = published.dense_of(model)
    width = 3 + 4  # pairs of three vectors, and the dense vector
    assert dense.parameters == (3 * 4 + 4) + (width * 2 + 2) + (2 * 1 + 1)
    assert dense.flops == 6 * (3 * 4 + width * 2 + 2) + 2 * 7 + 3 * 2 * 9 * 4


class Traffic(TorchDispatchMode):
    """Counts the numbers of a sample that operators read and write, and the operators."""

    numbers = operators = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func._schema.name.partition("::")[2]
        if not func.is_view and name not in NO_LAUNCH:
            tensors = {id(leaf): leaf for leaf in tree_leaves((args, kwargs, out)) if isinstance(leaf, torch.Tensor)}
            self.numbers += sum(leaf.numel() for leaf in tensors.values() if BATCH in leaf.shape) / BATCH
            self.operators += 1
        return out


@pytest.mark.parametrize("model", ["dlrm_dcnv2", "criteo_t3"])
def test_traffic_and_launches_of_the_dense_part_are_those_of_its_operators(model: str) -> None:
    dense, width = published.dense_of(MODELS[model]), 27 * 128
    bottom, interaction = DenseArch(13, (512, 256, 128)), InteractionArch(26)
    cross = LowRankCrossNet(width, mlperf.DCN_LAYERS, mlperf.DCN_LOW_RANK)
    top = OverArch(width if model == "dlrm_dcnv2" else 479, mlperf.OVER_ARCH_LAYERS)
    numbers, rows = torch.rand(BATCH, 13), torch.rand(BATCH, 26, 128, requires_grad=True)
    with Traffic() as found:
        vector = bottom(numbers)
        crossed = cross(torch.cat([vector, rows.flatten(1)], dim=1)) if model == "dlrm_dcnv2" else None
        logits = top(interaction(vector, rows) if crossed is None else crossed).squeeze(-1)
        torch.nn.functional.binary_cross_entropy_with_logits(logits, torch.ones(BATCH)).backward()
    assert dense.traffic == pytest.approx(found.numbers, rel=0.02)
    tensors = sum(len(list(part.parameters())) for part in (bottom, top, *([cross] if crossed is not None else [])))
    after = 6 + 2 * tensors + 1 + (crossed is not None) * 2  # optimizer, gradients into buckets and back, collectives
    assert dense.launches == pytest.approx(found.operators + after, abs=3)


def test_by_memory_deals_slices_forwards_and_backwards() -> None:
    sizes = [50, 40, 30, 20, 10]
    tables = [EmbeddingBagConfig(name=f"t{n}", num_embeddings=n, embedding_dim=4) for n in sizes]
    placed = published.layout("by_memory", tables, ranks=2)
    assert [placed[f"t{n}"].shards[0].rank for n in sizes] == [0, 1, 1, 0, 0]  # type: ignore[index]
    wide = [EmbeddingBagConfig(name="w", num_embeddings=published.COLUMN_SLICE // 4, embedding_dim=8)]
    shards = published.layout("by_memory", wide, ranks=2)["w"].shards
    assert {(shard.rank, shard.cols) for shard in shards or ()} == {(0, (4, 8)), (1, (0, 4))}


def test_the_table_states_predicted_published_error_and_source() -> None:
    rows = published.figures(only=["8 V100 (DGX-2)"])
    assert list(rows[0].beside) == ["published ms", "error %"]
    assert "DGX-2, FP32" in rows[0].note
    assert rows[0].value / rows[0].beside["published ms"] - 1 == pytest.approx(rows[0].beside["error %"] / 100)
    assert [row.name for row in rows[1:5]] == list(published.TARGETS)
    assert (
        rows[5].value
        == rows[3].value
        == rows[1].value
        == pytest.approx(published.mean_error([1 + rows[0].beside["error %"] / 100]))
    )
