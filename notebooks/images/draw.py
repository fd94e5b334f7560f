"""Draws the pictures of the README and of notebook 01: ``python notebooks/images/draw.py``."""

from pathlib import Path

import recshard_lab as rs
from recshard_lab.lab import views
from recshard_lab.lab.svg import standalone

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
Path(__file__).with_name("01_placement.svg").write_text(standalone(picture.svg) + "\n")
