"""Concept pages: pictures are what their code draws, and stated errors are the recorded ones."""

import re
import runpy
from pathlib import Path

import pytest

from benchmarks.gate.docs import executor_rows
from benchmarks.gate.record import Record

ROOT = Path(__file__).parents[1]
PAGES = sorted((ROOT / "docs/concepts").glob("*.md"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_has_a_picture_and_code(page: Path) -> None:
    assert "](../images/" in page.read_text()
    assert "```python" in page.read_text()


def test_pictures_are_what_their_code_draws() -> None:
    pictures = runpy.run_path(str(ROOT / "docs/pictures.py"))["PICTURES"]
    assert {path.stem for path in (ROOT / "docs/images").glob("*.svg")} == set(pictures)
    for name, draw in pictures.items():
        assert (ROOT / f"docs/images/{name}.svg").read_text() == draw() + "\n", "python docs/pictures.py"


def test_the_stated_errors_on_gpus_are_those_of_the_recorded_predictions() -> None:
    page = (ROOT / "docs/concepts/cost_model.md").read_text()
    rows = [row.strip("| ").split(" | ") for row in list(executor_rows(Record(ROOT / ".ci/figures.json")))[2:]]
    errors = {name: int(error.rstrip("%")) for name, _, error, _ in rows}
    (stated,) = re.findall(r"\| step on GPUs \|.*\| (\d+)% to (\d+)% \|", page)
    assert [int(number) for number in stated] == [min(errors.values()), max(errors.values())]
    ends = [float(end) for name, _, _, ratios in rows if name in ("HugeCTR", "SOK") for end in ratios.split(" to ")]
    assert "(HugeCTR, SOK), the prediction is within 30% of every step" in page
    assert max(max(end, 1 / end) for end in ends) <= 1.3
