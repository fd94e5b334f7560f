"""Ranks that end lose their variables: the panel asks first, and every widget that is bound to them says so."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from html import unescape

import pytest

from recshard_lab.lab import LiveCounters, RanksPanel, SchemeSwitcher
from recshard_lab.launcher import LaunchError, Ranks
from recshard_lab.planner import Workload
from tests.lab.test_scheme_switcher import MODEL
from tests.launched import launched
from tests.patience import wait_until

ranks = launched(2)


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
    wait_until(lambda: not getattr(panel, button).disabled)
    getattr(panel, button).click()
    assert "loses 2 variables on the ranks: tables, weights." in panel.message.value
    assert ranks.pids == pids
    assert ranks.pull("tables") == [3, 3]
    assert getattr(panel, button).button_style == "danger"
    getattr(panel, button).click()
    wait_until(
        lambda: "Their variables are gone: tables, weights. Run the cells that made them." in panel.message.value
    )
    assert not set(ranks.pids) & set(pids)
    assert getattr(panel, button).button_style == ""


def test_after_a_restart_the_switcher_greys_its_figures_and_says_why(switcher: SchemeSwitcher, ranks: Ranks) -> None:
    switcher.trains.value = True
    wait_until(lambda: switcher.live.measured)
    ranks.restart()
    wait_until(lambda: "The ranks were restarted: 'model' is gone." in unescape(switcher.message.value))
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
    wait_until(lambda: "'model' is gone" in unescape(switcher.message.value))
    ranks.exec(MODEL)
    wait_until(lambda: switcher.message.value == "" and not switcher.trains.disabled)
    assert switcher.live.losses == []
    assert switcher.curve.value == ""
    assert all("rs-gone" not in figures.value for figures in (*switcher.cards.values(), *switcher.pictures.values()))
    switcher.set({"movie": "row_wise"})
    assert switcher.apply().same
    ranks.restart()
    ranks.exec(MODEL.replace('"movie": 1000', '"movie": 1001'))
    wait_until(lambda: "has other tables now" in switcher.message.value)


def test_after_a_rank_died_the_switcher_says_so(switcher: SchemeSwitcher, ranks: Ranks) -> None:
    os.kill(ranks.pids[1], signal.SIGKILL)
    wait_until(lambda: "A rank ended: 'model' is gone." in unescape(switcher.message.value))


def test_after_a_restart_the_counters_are_grey_until_they_start_over(switcher: SchemeSwitcher, ranks: Ranks) -> None:
    counters = LiveCounters(ranks, every_s=0.05)
    switcher.train(2)
    wait_until(lambda: counters.history[-1].step == 2)
    ranks.restart()
    wait_until(
        lambda: "The ranks were restarted: 'model' is gone. Run its cell again." in unescape(counters.message.value)
    )
    assert "rs-gone" in counters.picture.value
    ranks.exec(MODEL)
    counters.again.click()
    wait_until(lambda: "rs-gone" not in counters.picture.value)
    ranks.exec("train_step()")
    wait_until(lambda: counters.history[-1].step == 1)
    counters.close()
