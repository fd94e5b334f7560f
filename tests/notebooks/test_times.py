"""Notebooks run within their times."""

import re

import pytest

from tests.notebooks.runs import FOLDER, NOTEBOOKS, run
from tests.patience import slowness

pytestmark = [pytest.mark.clock, pytest.mark.timeout(1800)]

MOST_SECONDS, MOST_SECONDS_OF_ALL = 45, 600  # lessons aim at 30 s


def test_notebooks_run_in_time_and_as_long_as_the_teachers_page_says() -> None:
    """Each within 45 s, all within ten minutes; the page is right within a factor of three, and three seconds."""
    page = (FOLDER / "TEACHING.md").read_text()
    seconds = {path.name: run(path)[1] / slowness() for path in NOTEBOOKS}
    told = {name: int(re.findall(rf"\({name}\) \| (\d+) s \|", page)[0]) for name in seconds}
    assert not {name: found for name, found in seconds.items() if found > MOST_SECONDS}
    assert sum(seconds.values()) < MOST_SECONDS_OF_ALL
    assert not [(n, s, told[n]) for n, s in seconds.items() if not told[n] / 3 - 3 <= s <= 3 * told[n] + 3]
