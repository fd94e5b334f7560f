"""StepThrough: what its frames show is what the ranks recorded, and everything shown comes from an earlier frame."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from collections.abc import Iterator

import numpy as np
import pytest
import torch
import traitlets

from recshard_lab.distributed import DistributedModelParallel
from recshard_lab.embedding import EmbeddingBagCollection, EmbeddingBagConfig
from recshard_lab.lab import StepThrough, views
from recshard_lab.lab.live.record_step import record_step
from recshard_lab.lab.live.recorded_step import STAGES, RecordedStep, record
from recshard_lab.lab.views.step_frames import WIDE, draw_frame
from recshard_lab.lab.views.step_pieces import Frame, Piece, Shown, shown_frames
from recshard_lab.launcher import LaunchError, RankError, Ranks, launch
from recshard_lab.sharding import scheme_names
from recshard_lab.sparse import KeyedJaggedTensor
from tests.lab.recorded import Truth, build, here, plan_of, recorded_step

NAMES = {"loss": "loss_of", "optimizer": "dense"}
SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with launch(2) as made:
        yield made


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


@pytest.mark.gate
@pytest.mark.parametrize("scheme", scheme_names())
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


@pytest.mark.parametrize("scheme", ["row_wise", "column_wise", "data_parallel"])
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


def test_bytes_and_times_are_beside_each_stage(widget: StepThrough) -> None:
    (step,) = widget.steps
    rows = {row[0]: row for row in views.step_frames(step).numbers.rows}
    traffic = step.traffic("output")
    between = int(traffic.sum() - np.trace(traffic))
    assert between == int(
        sum(
            bytes_to[1 - rank]
            for rank, own in enumerate(step.ranks)
            for label, bytes_to, _ in own.traffic
            if label.startswith("output_dist/")
        )
    )
    assert rows["Output dist"][1] == f"{between} B"
    assert f"{between} B between ranks" in frames_of(step)["output"].cost
    assert frames_of(step)["lookup"].cost.endswith("s")


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


def test_the_static_twin_outlines_what_is_followed(widget: StepThrough) -> None:
    widget.player.follow = "movie:7"
    (view,) = widget.views
    on = [g for g in ET.fromstring(view.svg).iter(f"{SVG}g") if g.get("class") == "rs-piece rs-on"]
    assert on
    assert all("movie:7" in json.loads(piece.get("data-follow", "")) for piece in on)
    bundle = widget._repr_mimebundle_()
    assert bundle["text/html"].startswith("<img alt=")
    assert "Output dist" in bundle["text/plain"]
    widget.player.follow = "sample A"


def test_the_same_step_under_two_plans_side_by_side(ranks: Ranks) -> None:
    build(ranks, plan_of("table_wise"))
    plans = {"rows": plan_of("row_wise"), "columns": plan_of("column_wise")}
    widget = StepThrough.compare(ranks, plans, "model", batch="batch", **NAMES)
    assert [step["name"] for step in widget.player.steps] == ["rows", "columns"]
    one, other = (frames_of(step)["output"].pieces for step in widget.steps)
    for a, b in zip(one, other, strict=True):
        assert np.allclose(a.rows[0][1], b.rows[0][1], atol=1e-6)
    assert "movie row-wise" in widget.player.steps[0]["about"]
    assert "movie column-wise" in widget.player.steps[1]["about"]
    with pytest.raises(ValueError, match="plans is empty"):
        StepThrough.compare(ranks, {}, batch="batch")
    widget.close()


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


def test_one_rank_sends_nothing() -> None:
    names = here()
    model = DistributedModelParallel(names["fresh"](), plan=plan_of("table_wise", 1))
    step = RecordedStep.of([record_step(model, names["batch_of"](0), names["loss_of"])])
    frames = frames_of(step)
    assert frames["ids_sent"].sentence == "There is one rank: all ids stay on it."
    assert only(frames["output"].pieces, "A", "liked").note == "rank 0"
    assert np.allclose(step.ranks[0].output, Truth(1).pooled[0].detach(), atol=1e-6)


def test_a_wrong_name_is_answered_with_a_fix(ranks: Ranks) -> None:
    build(ranks, plan_of("row_wise"))
    with pytest.raises(RankError, match=r"no variable 'modle' on this rank.*Fix: use 'model'\n"):
        StepThrough(ranks, "modle", batch="batch", **NAMES)


def test_ranks_that_have_ended_are_named(ranks: Ranks) -> None:
    ranks.stop()
    with pytest.raises(LaunchError, match="'model' is gone"):
        StepThrough(ranks, "model", batch="batch")


def test_a_long_row_number_is_beside_no_other_text() -> None:
    """Numbers of rows with three and more digits had been drawn over "before", or not at all."""
    movie = EmbeddingBagConfig(4_000, 4, name="movie", feature_names=["movie"])
    model = DistributedModelParallel(EmbeddingBagCollection([movie]))
    batch = KeyedJaggedTensor(["movie"], torch.tensor([342, 3_402]), lengths=torch.ones(2, dtype=torch.int64))
    step = RecordedStep.of([record_step(model, batch, lambda output: output.values().sum())])
    drawn = ET.fromstring(str(draw_frame(frames_of(step)["optimizer"], WIDE, "rs")))
    texts = [(float(t.get("y", 0)), t.text or "") for t in drawn.iter(f"{SVG}text")]
    numbers = {words: y for y, words in texts if words.isdecimal() and len(words) >= 3}
    assert set(numbers) == {"342", "3402"}
    assert not {*numbers.values()} & {y for y, words in texts if words in ("before", "after")}
