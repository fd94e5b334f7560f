"""Draws the pictures of the README and those that notebooks open with: ``python notebooks/images/draw.py``."""

import runpy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

import recshard_lab as rs
from recshard_lab.comm import CommType, codec_error
from recshard_lab.lab import views
from recshard_lab.lab.draw.svg import Svg, standalone
from recshard_lab.planner import AccessProfile

ROWS = {"user": 943, "movie": 1682, "age": 7, "gender": 2, "occupation": 21, "genres": 19}  # MovieLens 100K
tables = [
    rs.EmbeddingBagConfig(name=name, num_embeddings=rows, embedding_dim=16, feature_names=[name])
    for name, rows in ROWS.items()
]


def save(view: Any, name: str) -> None:
    Path(__file__).with_name(name).write_text(standalone(view.svg) + "\n")


uneven = rs.ShardingPlan({"": {n: rs.ParameterSharding("table_wise", ranks=[i % 3]) for i, n in enumerate(ROWS)}})
per_bag = dict.fromkeys(ROWS, 8.0) | {"movie": 60.0}
step = rs.estimate(uneven.resolved(tables, 4), tables, rs.Topology(4), rs.Workload(2048, per_bag))
save(views.phases(step, note="Predicted: rank 1 has the longest bags, rank 3 has no table."), "05_waiting.svg")

schemes = rs.sharding.scheme_names()
equal = [rs.EmbeddingBagConfig(name=n, num_embeddings=8_000, embedding_dim=32, feature_names=[n]) for n in schemes]
each = rs.ShardingPlan({"": {name: rs.ParameterSharding(name) for name in schemes}}).resolved(equal, 4, 2)
save(views.placement(each, equal, rs.Topology(4, local_world_size=2)), "06_schemes.svg")

law = np.arange(1, 8_001) ** -1.2
skewed = AccessProfile.of_ids([np.random.default_rng(0).choice(8_000, 60_000, p=law / law.sum())])
note = "60,000 ids drawn by Zipf's law, 1.2."
save(views.access_skew(skewed, num_embeddings=8_000, world_size=4, note=note), "07_skew.svg")

drawn_rows = torch.randn(1_000, 32, generator=torch.Generator().manual_seed(0))
rounded = {str(kind): codec_error(kind, drawn_rows) for kind in CommType}
save(views.wire_formats(rounded, note="1,000 rows of 32 normal random numbers."), "09_wire_formats.svg")

TRAIN = """
import torch
import recshard_lab as rs
from recshard_lab import train
from recshard_lab.comm import trace
from recshard_lab.data import RandomRecDataset
from recshard_lab.models import DLRMTrain
from recshard_lab.train.stages import events_from_collectives

names = [f"f{i}" for i in range(8)]
tables = [rs.EmbeddingBagConfig(20_000, 32, name=name, feature_names=[name]) for name in names]
model = DLRMTrain(rs.DLRM(rs.EmbeddingBagCollection(tables), 13, [64, 32], [128, 64, 1]))
cut = {name: rs.ParameterSharding("row_wise") for name in names}
model = rs.DistributedModelParallel(model, plan=rs.ShardingPlan({"model.embedding_bag_collection": cut}))
optimizer = torch.optim.SGD(model.dense_parameters(), lr=0.1)

def events(kind):
    data = iter(RandomRecDataset(names, 256, hash_size=20_000, ids_per_feature=5, num_dense=13, num_batches=14))
    with getattr(train, kind)(model, optimizer, torch.device("cpu")) as pipeline, trace() as said:
        for _ in range(14):
            pipeline.progress(data)
    return pipeline.events, events_from_collectives(said, rank)
"""
MESSAGES = {"input_dist/sizes": "sizes", "input_dist/ids": "ids", "output_dist/rows": "rows"}
MESSAGES["output_dist_backward/rows"] = "gradients"


def stacked(pictures: list[Any], title: str, words: str) -> str:
    """Several views as one drawing, one below the other."""
    drawn, y = [], 0.0
    for number, view in enumerate(pictures):
        picture = view.draw(f"rs-{number}")
        drawn.append(str(picture).replace("<svg ", f'<svg y="{y:.0f}" ', 1))
        y += picture.height + 6
    whole = Svg(pictures[0].draw("").width, y, title, words)
    for markup in drawn:
        whole.raw(markup)
    return str(whole)


with rs.launch(2, nodes=2, inter_node_latency_ms=12.0) as ranks:
    ranks.exec(TRAIN)
    told = {kind: ranks.eval(f"events({kind!r})")[0] for kind in ("TrainPipelineBase", "TrainPipelineSparseDist")}
known = {
    "TrainPipelineBase": "Plain loop",
    "TrainPipelineSparseDist": "SparseDist: the next ids are sent ahead",
}
note = "Measured when this was drawn: two ranks, 12 ms for every message (emulated)."
spans = []
for kind, (stages, sent) in told.items():
    shown = [event for event in stages if event.stage in ("input_dist", "forward", "backward", "optimizer")]
    skipped = ("sizes", "ids") if kind == "TrainPipelineSparseDist" else ()  # they are its input_dist
    shown += [replace(e, stage=MESSAGES[e.stage]) for e in sent if e.stage in MESSAGES]
    shown = [event for event in shown if event.stage not in skipped]
    spans.append(views.timeline(shown, batches=(6, 8), span_ms=200, name=known[kind], note=note))
words = "Above, a step waits for its own ids. Below, they are sent while the batch before is computed."
Path(__file__).with_name("15_pipeline.svg").write_text(standalone(stacked(spans, "Two time lines", words)) + "\n")

for other in ("tables.py", "boxes.py", "plans.py"):
    runpy.run_path(str(Path(__file__).with_name(other)), run_name="__main__")
