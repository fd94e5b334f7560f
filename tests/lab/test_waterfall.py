"""Change by change: to scale, honest about what was measured, simulated or published."""

import pytest

from recshard_lab.lab import views
from tests.lab.pictures import boxes

ROAD = {"before": 8.0, "graphs": 4.0, "copies": 5.0}


def widths(svg: str) -> dict[str, float]:
    return {words: box.width for words, box in boxes(svg).items()}


def test_bars_and_what_was_taken_away_are_to_scale() -> None:
    found = widths(views.waterfall(ROAD).svg)
    whole = found["before: 8 ms"]
    assert found["graphs: 4 ms"] == pytest.approx(whole / 2, abs=0.02)
    assert found["graphs: 4 ms less"] == pytest.approx(whole / 2, abs=0.02)
    assert found["copies: 5 ms"] == pytest.approx(whole / 2, abs=0.02)  # what was there before, ...
    assert found["copies: 1 ms more"] == pytest.approx(whole / 8, abs=0.02)  # ... and what was added


def test_it_says_whether_anybody_measured_it_and_keeps_what_others_published_apart() -> None:
    measured, simulated = views.waterfall(ROAD), views.waterfall(ROAD, simulated=True, published={"before": 16.0})
    assert "measured" in measured.title
    assert "simulated" in simulated.title
    assert "simulated" not in measured.text
    assert "measured" not in simulated.text
    assert "16 ms published" in simulated.svg
    assert widths(simulated.svg)["before: 8 ms"] < widths(measured.svg)["before: 8 ms"] / 1.5  # room for 16 ms
    assert measured.numbers.rows[1] == ["graphs", "4 ms", "4 ms less", ""]
    assert "1.6 times as fast" in measured.summary
    assert "Most came from graphs: 4 ms less." in measured.summary  # neither the first change nor the last
    names = ["simulated step", "removed by the change", "added by the change", "published"]
    assert [trace.name for trace in simulated.figure.data] == names
    assert simulated.figure.data[-1].x == (16.0,)


def test_what_cannot_be_drawn_is_said() -> None:
    assert "No step to show" in views.waterfall({}).problem
    assert "'graphs' takes nan ms" in views.waterfall({"before": 1.0, "graphs": float("nan")}).problem
    assert not views.waterfall({"before": 0.0}).problem
    many = views.waterfall({f"a change with a long name, number {i}": 1000.0 - i for i in range(1000)})
    assert "first 40 of 1000 changes" in many.svg
    assert len(many.numbers.rows) == 1000


def test_time_lines_to_be_compared_share_their_scale() -> None:
    from recshard_lab.train.stages import StageEvent

    short = [StageEvent(0, "forward", 0, 0.0, 0.01), StageEvent(0, "forward", 1, 0.01, 0.02)]
    long = [StageEvent(0, "forward", 0, 0.0, 0.02), StageEvent(0, "forward", 1, 0.02, 0.04)]
    drawn = [max(widths(views.timeline(events, span_ms=40, name="one").svg).values()) for events in (short, long)]
    assert drawn[0] == pytest.approx(drawn[1] / 2, abs=0.05)
    assert views.timeline(short, name="one").title.startswith("one: batches 0 to 1")
