"""Draws the pictures of the README and those that notebooks open with: ``python notebooks/images/draw.py``."""

import runpy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

import recshard_lab as rs
from recshard_lab.lab import views
from recshard_lab.lab.draw.svg import Svg, standalone

ROWS = {"user": 943, "movie": 1682, "age": 7, "gender": 2, "occupation": 21, "genres": 19}  # MovieLens 100K
SCHEMES = {
    "user": "column_wise",
    "movie": "row_wise",
    "age": "data_parallel",
    "gender": "data_parallel",
    "occupation": "table_wise",
    "genres": "table_wise",
}

tables = [
    rs.EmbeddingBagConfig(name=name, num_embeddings=rows, embedding_dim=16, feature_names=[name])
    for name, rows in ROWS.items()
]
plan = rs.ShardingPlan({"": {name: rs.ParameterSharding(scheme) for name, scheme in SCHEMES.items()}})
picture = views.placement(plan.resolved(tables, world_size=4), tables, note="Tables of MovieLens 100K.")


def save(view: Any, name: str) -> None:
    Path(__file__).with_name(name).write_text(standalone(view.svg) + "\n")


save(picture, "01_placement.svg")

ids, lengths = torch.tensor([10, 11, 12, 40, 41, 42, 3, 5, 5, 7, 1]), torch.tensor([2, 1, 0, 3, 1, 1, 2, 1])
save(views.jagged_anatomy(rs.KeyedJaggedTensor(["film", "genre"], ids, lengths=lengths)), "02_jagged.svg")

uneven = rs.ShardingPlan({"": {n: rs.ParameterSharding("table_wise", ranks=[i % 3]) for i, n in enumerate(ROWS)}})
step = rs.estimate(uneven.resolved(tables, 4), tables, rs.Topology(4), rs.Workload(2048, 8.0))
save(views.phases(step, note="Predicted: rank 3 holds no table."), "05_waiting.svg")

schemes = rs.sharding.scheme_names()
equal = [rs.EmbeddingBagConfig(name=n, num_embeddings=8_000, embedding_dim=32, feature_names=[n]) for n in schemes]
each = rs.ShardingPlan({"": {name: rs.ParameterSharding(name) for name in schemes}}).resolved(equal, 4, 2)
save(views.placement(each, equal, rs.Topology(4, local_world_size=2)), "06_schemes.svg")

mlperf = rs.planner.mlperf_dlrm_dcnv2_tables(), rs.planner.mlperf_dlrm_dcnv2_workload()
sizes = [2, 8, 16, 32, 64, 128]
swept = rs.sweep(*mlperf, topology=["a100", "h100"], world_size=sizes, global_batch_size=65_536)
save(views.pareto(swept, note="MLPerf's DLRM-DCNv2; published bandwidths, no machine was measured."), "11_pareto.svg")


def best_ms(train: Callable[[Any], None], batch: Any) -> float:
    """The shortest of nine steps, after three to warm up."""
    spent = []
    for _ in range(12):
        begun = perf_counter()
        train(batch)
        spent.append(1000 * (perf_counter() - begun))
    return min(spent[3:])


def one_by_one(tables: list[rs.EmbeddingBagConfig]) -> Callable[[Any], None]:
    modules = [torch.nn.EmbeddingBag(t.num_embeddings, t.embedding_dim, mode="sum", sparse=True) for t in tables]
    step = torch.optim.SGD([module.weight for module in modules], lr=0.01)

    def train(batch: Any) -> None:
        step.zero_grad()
        bags = [batch[table.feature_names[0]] for table in tables]
        pooled = [m(bag.values(), bag.offsets()[:-1]).sum() for m, bag in zip(modules, bags, strict=True)]
        torch.stack(pooled).sum().backward()
        step.step()

    return train


def all_at_once(tables: list[rs.EmbeddingBagConfig]) -> Callable[[Any], None]:
    fused = rs.FusedEmbeddingBagCollection(tables, torch.optim.SGD, {"lr": 0.01})
    return lambda batch: fused(batch).values().sum().backward()


torch.set_num_threads(1)
counts = [1, 2, 4, 8, 16, 26]
found: dict[str, list[float]] = {"one module a table": [], "one fused collection": []}
for count in counts:
    own = [
        rs.EmbeddingBagConfig(name=f"t{i}", num_embeddings=20_000, embedding_dim=32, feature_names=[f"f{i}"])
        for i in range(count)
    ]
    names = [table.feature_names[0] for table in own]
    small = rs.KeyedJaggedTensor(names, torch.randint(0, 20_000, (count * 128,)), lengths=torch.full((count * 64,), 2))
    found["one module a table"].append(best_ms(one_by_one(own), small))
    found["one fused collection"].append(best_ms(all_at_once(own), small))
lines = {name: (counts, ms) for name, ms in found.items()}
note = "64 samples, 2 ids a bag, 20,000 x 32 tables, one CPU thread; measured when this was drawn."
save(views.curves(lines, x_label="tables", y_label="ms a step", note=note), "03_batched.svg")


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


with rs.launch(2, nodes=2, inter_node_latency_ms=6.0) as ranks:
    ranks.exec(TRAIN)
    told = {kind: ranks.eval(f"events({kind!r})")[0] for kind in ("TrainPipelineBase", "TrainPipelineSparseDist")}
known = {"TrainPipelineBase": "One thing after the other", "TrainPipelineSparseDist": "The next ids on their way"}
note = "Measured when this was drawn: two ranks, every message 6 ms under way (emulated)."
spans = []
for kind, (stages, sent) in told.items():
    shown = [event for event in stages if event.stage in ("input_dist", "forward", "backward", "optimizer")]
    skipped = ("sizes", "ids") if kind == "TrainPipelineSparseDist" else ()  # they are its input_dist
    shown += [replace(e, stage=MESSAGES[e.stage]) for e in sent if e.stage in MESSAGES]
    shown = [event for event in shown if event.stage not in skipped]
    spans.append(views.timeline(shown, batches=(6, 8), span_ms=115, name=known[kind], note=note))
words = "Above a step waits for its own ids; below they travel while the batch before is computed."
Path(__file__).with_name("15_pipeline.svg").write_text(standalone(stacked(spans, "Two time lines", words)) + "\n")

runpy.run_path(str(Path(__file__).with_name("boxes.py")))
