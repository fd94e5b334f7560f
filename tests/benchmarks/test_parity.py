"""The same weights on all sides: our ranks beside plain torch, and beside TorchRec where its environment is given."""

from __future__ import annotations

import os
import sys

import numpy as np
import pytest

from benchmarks import parity
from benchmarks.apparatus.run_cases import put_to_sides
from benchmarks.apparatus.step_case import ADAGRAD, BY_NODE, FLAT, ROWWISE, SGD, StepCase

NEEDS_PEERS = pytest.mark.skipif(
    "RECSHARD_PEERS" not in os.environ, reason="RECSHARD_PEERS does not name an interpreter that has TorchRec"
)


def test_every_scheme_meets_every_optimizer_and_pooling() -> None:
    asked = {(case.layout, case.optimizer, case.mean) for case in parity.cases()}
    layouts = {layout for layout, _, _ in asked}
    assert layouts >= {*FLAT, *BY_NODE}
    assert asked == {(lay, opt, mean) for lay in layouts for opt in (SGD, ADAGRAD, ROWWISE) for mean in (False, True)}


@pytest.mark.gate
def test_ours_trains_the_weights_that_plain_torch_trains() -> None:
    case = StepCase("mixed", ROWWISE, "zipf", rows=60, dim=8, batch=8, pooling=3, mean=True)
    (figure,) = put_to_sides([case], parity.one, {"ours": sys.executable})
    assert figure.ok
    assert figure.value < parity.BOUND


def test_the_quirks_of_torchrec_change_weights_only_where_they_are_said_to() -> None:
    sizes = {"rows": 30, "dim": 8, "batch": 8, "pooling": 3}
    quiet = StepCase("row_wise", ROWWISE, "zipf", mean=True, **sizes)
    loud = StepCase("mixed", ROWWISE, "zipf", mean=True, **sizes)
    for case, differs in ((quiet, False), (loud, True)):
        plain, quirky = (parity.with_plain_torch(case, 3, as_torchrec=as_theirs) for as_theirs in (False, True))
        assert bool(parity.quirks(case)) == differs
        assert (parity.difference(quirky, plain) > 1e-3) == differs
        assert parity.difference(quirky, plain) >= 0


def test_a_part_of_a_table_that_no_rank_holds_is_no_agreement() -> None:
    whole = {"t": np.ones((2, 2), np.float32)}
    holed = {"t": np.array([[1, 1], [1, np.nan]], np.float32)}
    assert np.isnan(parity.difference(holed, whole))


@NEEDS_PEERS
@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_torchrec_and_we_train_the_same_weights_but_for_its_quirks() -> None:
    figures = parity.figures(with_torchrec=True)
    assert len(figures) == len(parity.cases())
    for figure in figures:
        assert figure.value <= parity.BOUND, figure
        assert figure.beside["ours - torch"] <= parity.BOUND, figure
        far = figure.beside["TorchRec - torch"] > 100 * parity.BOUND
        assert far == ("TorchRec - its quirk" in figure.beside) == bool(figure.note), figure
