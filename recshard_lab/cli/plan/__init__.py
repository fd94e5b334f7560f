"""``recshard plan``: makes plans, compares them, simulates other machines, explains plans and checks them.

Walking order: `make`, `compare`, `sweep`, `explain` (and ``diff``), `check`. `planning` plans for all of them.
"""

from __future__ import annotations

import typer

from recshard_lab.cli.options import examples
from recshard_lab.cli.plan.check import check
from recshard_lab.cli.plan.compare import compare
from recshard_lab.cli.plan.explain import diff, explain
from recshard_lab.cli.plan.make import make
from recshard_lab.cli.plan.sweep import sweep

_TABLES = {
    "tables.yaml, one table per line (--example prints a longer one)": (
        "- {name: film, num_embeddings: 80, embedding_dim: 64, feature_names: [seen]}",
        "- {name: user, num_embeddings: 90, embedding_dim: 64, feature_names: [user]}",
        "- {name: kind, num_embeddings: 20, embedding_dim: 16, feature_names: [kind]}",
        "num_embeddings: rows. embedding_dim: columns.",
        "feature_names: the features whose ids are looked up in the table.",
    )
}

app = typer.Typer(
    help="Choose each table's scheme and ranks, predict the step, compare and explain plans.",
    no_args_is_help=True,
    epilog=examples(
        "recshard plan make --example > tables.yaml",
        "recshard plan make tables.yaml --topology h100x8 --out plan.json",
        "recshard plan compare tables.yaml planner row_wise mine=plan.json -n 8",
        "recshard plan sweep tables.yaml --topology a100,h100 --ranks 8,64",
        "recshard plan explain tables.yaml movies --topology h100x8",
    ),
)
app.command(
    epilog=examples(
        "recshard plan make --example > tables.yaml",
        "recshard plan make tables.yaml -n 4 --out plan.json --out report.html",
        "recshard plan make model.py:build --topology h100x8 --out train.py",
        more=_TABLES,
    )
)(make)
app.command(
    epilog=examples(
        "recshard plan compare tables.yaml planner row_wise -n 8",
        "recshard plan compare tables.yaml planner mine=plan.json --out plans.html",
    )
)(compare)
app.command(
    epilog=examples(
        "recshard plan sweep tables.yaml --topology a100,h100 -n 8,64 --out all.csv",
        "recshard plan sweep tables.yaml --memory-gb 40GB,80GB --out sweep.html",
        "recshard plan sweep --example mlperf-dlrm-dcnv2 --ranks 8,128",
    )
)(sweep)
app.command(
    epilog=examples(
        "recshard plan explain tables.yaml -n 4",
        "recshard plan explain tables.yaml movies --plan plan.json -n 4",
        "recshard plan explain tables.yaml movies --why-not movies=row_wise -n 4",
    )
)(explain)
app.command(
    epilog=examples(
        "recshard plan diff tables.yaml old.json -n 4",
        "recshard plan diff tables.yaml old.json new.json --topology h100x8",
    )
)(diff)
app.command(
    epilog=examples(
        "recshard plan check plan.json",
        "recshard plan check plan.json tables.yaml -n 4",
        "recshard plan check --schema > plan.schema.json",
    )
)(check)
