"""Weights after 50 training steps: ours beside plain torch and TorchRec, every scheme, optimizer and pooling.

All start from the same weights, read the same Zipf ids and step towards the same targets. Each step's gradient depends
on the weights after the previous step. The difference is the largest of any weight, over the largest weight.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.functional import embedding_bag

from benchmarks import Figure
from benchmarks.apparatus.run_cases import Sides, run_cases
from benchmarks.apparatus.sides import Side, SideFailed
from benchmarks.apparatus.step_case import ADAGRAD, BY_NODE, FLAT, ROWWISE, SGD, StepCase, named
from benchmarks.apparatus.step_worker import BATCHES, PARITY_EPS, PARITY_LEARNING_RATE, target_of
from recshard_lab.embedding import RowWiseAdagrad
from recshard_lab.sharding import scheme_names

STEPS = 50
BOUND = 1e-5


@dataclass(frozen=True)
class Quirk:
    """A change to the weights that TorchRec 1.8 makes under some plans, and not in its unsharded module.

    Args:
        name: in the name of the case.
        about: its description, printed under the table.
    """

    name: str
    about: str


NORMS = Quirk(
    "row norm by piece", "row-wise Adagrad divides each column piece of a row by the norm of that piece alone"
)
MEANS = Quirk(
    "mean twice", "where a plan mixes row-wise tables with others, means of the others are divided by the length twice"
)
MEANS_OF_GRID = Quirk("sum for mean", "bags of a grid-sharded table are summed where their mean was asked for")

Weights = dict[str, NDArray[np.float32]]


def cases() -> list[StepCase]:
    """Schemes as far as they are registered; those by node on two virtual nodes of two ranks."""
    known = {*scheme_names(), "mixed"}
    return [
        StepCase(layout, optimizer, "zipf", rows=1000, batch=64, pooling=5, ranks=ranks, local_ranks=2, mean=mean)
        for layouts, ranks in ((FLAT, 2), (BY_NODE, 4))
        for layout, optimizer, mean in product(layouts, (SGD, ADAGRAD, ROWWISE), (False, True))
        if layout in known
    ]


def figures(*, with_torchrec: bool = False, only: Sequence[str] = ()) -> list[Figure]:
    """For each case our distance from plain torch, or from TorchRec; beside it the distance of each from plain torch.

    Under some plans TorchRec trains other weights than its unsharded module. The name of the case then contains the
    quirk, and the note describes it. TorchRec is far from plain torch ("TorchRec - torch") and close to plain torch
    with that quirk ("TorchRec - its quirk"). The figure is the larger of our distance from plain torch and TorchRec's
    from its quirk.

    Args:
        with_torchrec: installs TorchRec in a temporary environment.
        only: parts of case names; all when left out.

    Raises:
        ValueError: an `only` that no case has in its name.
    """
    return run_cases(named(cases(), only), one, with_torchrec=with_torchrec)


def one(case: StepCase, sides: Sides) -> Figure:
    """Trains on every side. All sides average gradients over ranks."""
    truth = with_plain_torch(case)
    ours = trained(sides["ours"], case)
    from_torch = difference(ours, truth)
    if "theirs" not in sides:
        return Figure(case.name, from_torch, "relative", target=BOUND)
    try:
        theirs = trained(sides["theirs"], case)
    except SideFailed as error:
        sides.start("theirs")
        beside = {"ours - torch": from_torch}
        return Figure(f"{case.name}: TorchRec cannot: {error}", math.nan, "relative", beside=beside)
    beside = {"ours - torch": from_torch, "TorchRec - torch": difference(theirs, truth)}
    known = quirks(case)
    if not known:
        return Figure(case.name, difference(ours, theirs), "relative", target=BOUND, beside=beside)
    from_quirk = difference(theirs, with_plain_torch(case, as_torchrec=True))
    return Figure(
        f"{case.name} ({', '.join(quirk.name for quirk in known)})",
        max(from_torch, from_quirk),
        "relative",
        target=BOUND,
        beside=beside | {"TorchRec - its quirk": from_quirk},
        note="\n".join(f"{quirk.name}: in TorchRec, {quirk.about}." for quirk in known),
    )


def trained(side: Side, case: StepCase, steps: int = STEPS) -> Weights:
    """Whole tables, put together from what the ranks hold.

    Raises:
        SideFailed: the side cannot run the case.
    """
    whole = {name: np.full((case.rows, case.dim), np.nan, np.float32) for name in case.table_names()}
    with tempfile.TemporaryDirectory() as folder:
        side.build(case, comparing=True)
        side.train(steps, f"{folder}/w")
        for rank in range(case.ranks):
            with np.load(Path(folder, f"w.{rank}.npz")) as pieces:
                for key in pieces.files:
                    name, row, col = key.split(" ")
                    piece = pieces[key]
                    rows, cols = slice(int(row), int(row) + len(piece)), slice(int(col), int(col) + piece.shape[1])
                    whole[name][rows, cols] = piece
    return whole


def with_plain_torch(case: StepCase, steps: int = STEPS, *, as_torchrec: bool = False) -> Weights:
    """The same training on one process: ``embedding_bag`` and a torch optimizer on dense gradients.

    as_torchrec: with what `quirks` says of it.
    """
    known = quirks(case) if as_torchrec else ()
    entries = case.plan().tables()
    pieces: list[list[torch.nn.Parameter]] = []
    again: list[float] = []
    for name, weight in case.first_weights().items():
        cuts = sorted({shard.cols for shard in entries[name].shards}) if NORMS in known else [(0, case.dim)]
        pieces.append([torch.nn.Parameter(torch.from_numpy(weight[:, c0:c1].copy())) for c0, c1 in cuts])
        row_wise = entries[name].sharding_type == "row_wise"
        again.append(
            case.pooling if MEANS_OF_GRID in known else 1 / case.pooling if MEANS in known and not row_wise else 1.0
        )
    optimizer = _optimizer(case, [piece for table in pieces for piece in table])
    targets = [target_of(case, rank) for rank in range(case.ranks)]
    ids = [[torch.from_numpy(case.bag_ids(r, n)) for n in range(BATCHES)] for r in range(case.ranks)]
    for number in range(steps):
        optimizer.zero_grad()
        for rank, target in enumerate(targets):
            bags = ids[rank][number % BATCHES].view(case.tables, case.batch, case.pooling)
            pooled = [
                embedding_bag(bag, piece, mode="mean" if case.mean else "sum") * factor
                for bag, table, factor in zip(bags, pieces, again, strict=True)
                for piece in table
            ]
            out = torch.cat(pooled, 1)
            out.backward((out.detach() - target) / (case.ranks * case.batch))
        optimizer.step()
    return {
        name: torch.cat([piece.detach() for piece in table], 1).numpy()
        for name, table in zip(case.table_names(), pieces, strict=True)
    }


def quirks(case: StepCase) -> tuple[Quirk, ...]:
    """Where TorchRec 1.8 trains other weights than the unsharded module."""
    cut_by_columns = case.layout in ("column_wise", "table_column_wise", "grid_shard", "mixed")
    found = [
        (NORMS, case.optimizer == ROWWISE and cut_by_columns),
        (MEANS, case.mean and case.layout == "mixed"),
        (MEANS_OF_GRID, case.mean and case.layout == "grid_shard"),
    ]
    return tuple(quirk for quirk, there in found if there)


def _optimizer(case: StepCase, weights: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    rate = PARITY_LEARNING_RATE
    if case.optimizer == SGD:
        return torch.optim.SGD(weights, lr=rate)
    if case.optimizer == ADAGRAD:
        return torch.optim.Adagrad(weights, lr=rate, eps=PARITY_EPS)
    return RowWiseAdagrad(weights, lr=rate, eps=PARITY_EPS)


def difference(one: Weights, other: Weights) -> float:
    """Largest difference over the largest weight of `other`; NaN where a part of a table is missing."""
    largest = max(float(np.abs(weight).max()) for weight in other.values())
    return float(max(np.abs(one[name] - other[name]).max() for name in other)) / largest
