"""Ranks that end lose their variables: the panel asks first, and every widget that is bound to them says so."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from html import unescape

import pytest

from recshard_lab.lab import DrawingBoard, LiveCounters, RanksPanel, SchemeSwitcher
from recshard_lab.launcher import LaunchError, Ranks, launch
from recshard_lab.planner import Workload
from recshard_lab.sharding import Topology
from tests.lab.plans import table
from tests.lab.test_scheme_switcher import MODEL, until


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with launch(2) as made:
        yield made


@pytest.fixture
def panel() -> Iterator[RanksPanel]:
    made = RanksPanel(every_s=0.05)
    yield made
    made.close()


@pytest.fixture
def switcher(ranks: Ranks) -> Iterator[SchemeSwitcher]:
    if not ranks.usable:
        ranks.restart()
    ranks.exec(MODEL)
    made = SchemeSwitcher(ranks, "model", "train_step", workload=Workload(32, 2.0))
    yield made
    made.close()


@pytest.mark.parametrize("button", ["restart_button", "stop_button"])
def test_one_click_loses_nothing_and_names_what_the_second_loses(ranks: Ranks, panel: RanksPanel, button: str) -> None:
    ranks.restart()
    ranks.exec("weights, tables = [1.0], 3")
    pids = ranks.pids
    until(lambda: not getattr(panel, button).disabled)
    getattr(panel, button).click()
    assert "loses 2 variables on the ranks: tables, weights." in panel.message.value
    assert ranks.pids == pids
    assert ranks.pull("tables") == [3, 3]
    assert getattr(panel, button).button_style == "danger"
    getattr(panel, button).click()
    until(lambda: "Their variables are gone: tables, weights. Run the cells that made them." in panel.message.value)
    assert not set(ranks.pids) & set(pids)
    assert getattr(panel, button).button_style == ""


def test_a_click_elsewhere_or_a_while_takes_the_question_back(
    ranks: Ranks, panel: RanksPanel, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks.restart()
    ranks.exec("weights = 1.0")
    pids = ranks.pids
    until(lambda: not panel.stop_button.disabled)
    panel.restart_button.click()
    panel.stop_button.click()
    assert "Stop loses 1 variable on" in panel.message.value
    assert panel.restart_button.button_style == ""
    monkeypatch.setattr("recshard_lab.lab.widgets.ranks_panel.CONFIRM_S", 0.1)
    panel.restart_button.click()
    until(lambda: panel.message.value == "" and panel.restart_button.button_style == "")
    assert ranks.pids == pids


def test_ranks_without_variables_are_restarted_by_one_click(ranks: Ranks, panel: RanksPanel) -> None:
    ranks.restart()
    pids = ranks.pids
    until(lambda: not panel.restart_button.disabled)
    panel.restart_button.click()
    until(lambda: "Fresh ranks" in panel.message.value)
    assert "variables" not in panel.message.value
    assert not set(ranks.pids) & set(pids)


def test_an_error_keeps_its_lines(panel: RanksPanel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("recshard_lab.lab.widgets.ranks_panel.current", lambda: raise_lines())
    panel._act(lambda _: "")
    until(lambda: "first line\nsecond line" in panel.message.value)


def raise_lines() -> None:
    raise LaunchError("first line\nsecond line")


def test_after_a_restart_the_switcher_greys_its_figures_and_says_why(switcher: SchemeSwitcher, ranks: Ranks) -> None:
    switcher.trains.value = True
    until(lambda: switcher.live.measured)
    ranks.restart()
    until(lambda: "The ranks were restarted: 'model' is gone." in unescape(switcher.message.value))
    assert "Traceback" not in switcher.message.value
    assert not switcher.trains.value
    assert switcher.trains.disabled
    assert switcher.button.disabled
    for figures in (*switcher.cards.values(), *switcher.pictures.values(), switcher.badge, switcher.curve):
        assert "rs-gone" in figures.value
    with pytest.raises(LaunchError, match="The ranks were restarted: 'model' is gone"):
        switcher.train(1)
    switcher.set({"movie": "row_wise"})
    with pytest.raises(LaunchError, match="Run its cell again"):
        switcher.apply()


def test_the_switcher_follows_a_model_that_is_made_again(switcher: SchemeSwitcher, ranks: Ranks) -> None:
    switcher.train(2)
    ranks.restart()
    until(lambda: "'model' is gone" in unescape(switcher.message.value))
    ranks.exec(MODEL)
    until(lambda: switcher.message.value == "" and not switcher.trains.disabled)
    assert switcher.live.losses == []
    assert switcher.curve.value == ""
    assert all("rs-gone" not in figures.value for figures in (*switcher.cards.values(), *switcher.pictures.values()))
    switcher.set({"movie": "row_wise"})
    assert switcher.apply().same
    ranks.restart()
    ranks.exec(MODEL.replace('"movie": 1000', '"movie": 1001'))
    until(lambda: "has other tables now" in switcher.message.value)


def test_after_a_rank_died_the_switcher_says_so(switcher: SchemeSwitcher, ranks: Ranks) -> None:
    os.kill(ranks.pids[1], signal.SIGKILL)
    until(lambda: "A rank ended: 'model' is gone." in unescape(switcher.message.value))


def test_after_a_restart_the_board_greys_the_run(ranks: Ranks) -> None:
    ranks.restart()
    board = DrawingBoard(table("movies", 1000), Topology(2), Workload(32, 2.0))
    board.run(2)
    assert "rs-gone" not in board.card.value + board.badge.value
    ranks.restart()
    until(lambda: "The ranks were restarted" in board.message.value)
    assert "rs-gone" in board.card.value
    assert "rs-gone" in board.badge.value
    board.run(2)
    assert "rs-gone" not in board.card.value + board.badge.value
    board.close()


def test_after_a_restart_the_counters_are_grey_until_they_start_over(switcher: SchemeSwitcher, ranks: Ranks) -> None:
    counters = LiveCounters(ranks, every_s=0.05)
    switcher.train(2)
    until(lambda: counters.history[-1].step == 2)
    ranks.restart()
    until(lambda: "The ranks were restarted: 'model' is gone. Run its cell again." in unescape(counters.message.value))
    assert "rs-gone" in counters.picture.value
    ranks.exec(MODEL)
    counters.again.click()
    until(lambda: "rs-gone" not in counters.picture.value)
    ranks.exec("train_step()")
    until(lambda: counters.history[-1].step == 1)
    counters.close()
