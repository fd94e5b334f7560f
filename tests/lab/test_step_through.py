"""StepThrough: what its frames show is what the ranks recorded, and everything shown comes from an earlier frame."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from collections.abc import Iterator

import numpy as np
import pytest
import traitlets

from recshard_lab.lab import StepThrough, views
from recshard_lab.lab.live.recorded_step import STAGES, RecordedStep, record
from recshard_lab.lab.views.step_pieces import Frame, Piece, Shown, shown_frames
from recshard_lab.launcher import RankError, Ranks
from tests.lab.pictures import SVG
from tests.lab.recorded import Truth, build, plan_of, recorded_step
from tests.launched import launched

OTHERS = ("column_wise", "data_parallel")
NAMES = {"loss": "loss_of", "optimizer": "dense"}


ranks = launched(2)


@pytest.fixture(scope="module")
def widget(ranks: Ranks) -> Iterator[StepThrough]:
    build(ranks, plan_of("row_wise"))
    made = StepThrough(ranks, "model", batch="batch", **NAMES)
    yield made
    made.close()


def frames_of(step: RecordedStep) -> dict[str, Frame]:
    return {frame.stage: frame for frame in shown_frames(Shown(step))}


def names_of(truth: Truth) -> dict[str, tuple[int, int]]:
    """Name of each sample -> its rank and number."""
    places = [(rank, n) for rank, batch in enumerate(truth.batches) for n in range(batch.stride())]
    return {chr(ord("A") + number): place for number, place in enumerate(places)}


def only(pieces: list[Piece], sample: str, label: str) -> Piece:
    (found,) = (piece for piece in pieces if piece.samples == (sample,) and piece.label == label)
    return found


@pytest.mark.parametrize("scheme", ["row_wise", *(pytest.param(one, marks=pytest.mark.gate) for one in OTHERS)])
def test_frames_show_the_rows_of_the_unsharded_model(ranks: Ranks, scheme: str) -> None:
    truth, _ = Truth(), build(ranks, plan_of(scheme))
    step = record(ranks, "model", "batch", **NAMES)
    frames = frames_of(step)
    assert list(frames) == list(STAGES)
    for name, (rank, sample) in names_of(truth).items():
        start = 0
        for block in step.blocks:
            columns = slice(start, start := start + block.dim)
            for stage, rows in (("output", truth.pooled), ("gradient", truth.grads)):
                piece = only(frames[stage].pieces, name, block.feature)
                assert np.allclose(piece.rows[0][1], rows[rank][sample, columns].detach(), atol=1e-6)
    for stage, late in (("lookup", False), ("optimizer", True)):
        for piece in frames[stage].pieces:
            (key,) = piece.ids
            table, row = key.split(":")
            first = int(piece.key.split(".")[-1])
            whole = truth.table(table, after=late)[int(row)].numpy()
            got = piece.rows[-1][1]
            assert np.allclose(got, whole[first : first + len(got)], atol=1e-6)


@pytest.mark.parametrize("scheme", ["row_wise", "data_parallel"])
def test_a_sample_can_be_followed_through_every_stage(ranks: Ranks, scheme: str) -> None:
    truth, _ = Truth(), build(ranks, plan_of(scheme))
    frames = frames_of(record(ranks, "model", "batch", **NAMES))
    for name, (rank, sample) in names_of(truth).items():
        bags = {key: truth.batches[rank][key] for key in ("liked", "seen", "user")}
        ids = [part.values()[part.offsets()[sample] : part.offsets()[sample + 1]].tolist() for part in bags.values()]
        tokens = [piece for piece in frames["batch"].pieces if name in piece.samples]
        assert [int(piece.label) for piece in tokens] == [one for bag in ids for one in bag]
        rows = {f"movie:{one}" for bag in ids[:2] for one in bag} | {f"user:{one}" for one in ids[2]}
        for stage in ("ids_sent", "ids_arrived", "lookup", "optimizer"):
            assert {key for piece in frames[stage].pieces if name in piece.samples for key in piece.ids} == rows


@pytest.mark.parametrize("route", ["direct", "distinct_rows"])
@pytest.mark.parametrize("scheme", ["row_wise", "data_parallel"])
def test_every_piece_comes_from_an_earlier_one(ranks: Ranks, scheme: str, route: str) -> None:
    build(ranks, plan_of(scheme, route=route if scheme == "row_wise" else "direct"))
    seen: set[str] = set()
    for frame in shown_frames(Shown(record(ranks, "model", "batch", **NAMES))):
        keys = [piece.key for piece in frame.pieces]
        assert len(set(keys)) == len(keys)
        for piece in frame.pieces:
            assert set(piece.origin) <= seen
            assert piece.origin or frame.stage == "batch" or piece.note == "empty bag"
        seen |= set(keys)


def test_the_page_has_the_frames_of_both_widths_and_checks_what_it_gets(widget: StepThrough) -> None:
    player = widget.player
    (shown,) = player.steps
    for kind, width in (("wide", 860), ("narrow", 380)):
        assert len(shown[kind]) == len(player.stages) == len(STAGES)
        for svg in shown[kind]:
            root = ET.fromstring(svg)
            assert root.get("role") == "img"
            assert float(root.get("width", 0)) == width
    keys = {key for _, key in player.choices}
    pieces = [g for g in ET.fromstring(shown["wide"][0]).iter(f"{SVG}g") if g.get("class") == "rs-piece"]
    assert pieces
    assert {key for piece in pieces for key in json.loads(piece.get("data-follow", ""))} <= keys
    assert player.follow == "sample A"
    with pytest.raises(ValueError, match="follow must be a sample or a row that is shown"):
        player.follow = "sample Q"
    with pytest.raises((ValueError, traitlets.TraitError), match="stage must be 0 to 9, got 10"):
        player.stage = 10


def test_a_large_step_is_shown_in_part_and_says_so() -> None:
    step = recorded_step(ranks=16, samples=100, tables=20)
    shown = Shown(step)
    assert len(shown.names) == 8
    assert shown.left_out == "Not shown: 1,592 samples, 17 features, 8 ranks."
    assert len(str(views.step_frames(step).svg)) < 400_000
    with pytest.raises(ValueError, match="feature 'nothing' is not one of the collection"):
        Shown(step, features=["nothing"])
    with pytest.raises(ValueError, match="samples must be at least 1, got 0"):
        Shown(step, samples=0)


def test_a_wrong_name_is_answered_with_a_fix(ranks: Ranks) -> None:
    build(ranks, plan_of("row_wise"))
    with pytest.raises(RankError, match=r"no variable 'modle' on this rank.*Fix: use 'model'\n"):
        StepThrough(ranks, "modle", batch="batch", **NAMES)
