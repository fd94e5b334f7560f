"""Half of the notebooks run as their stored outputs show; `test_runs_a` runs the others beside them."""

from pathlib import Path
from typing import Any

import pytest
from nbclient import NotebookClient

from tests.notebooks.runs import OTHERS, check_outputs, check_run, run

pytestmark = pytest.mark.gate


@pytest.fixture(scope="module", params=OTHERS[1::2], ids=lambda path: path.stem)
def executed(request: pytest.FixtureRequest, client: NotebookClient) -> tuple[Path, Any]:
    return request.param, run(request.param, client)[0]


def test_it_runs_top_to_bottom_and_writes_nothing_to_stderr(executed: tuple[Path, Any]) -> None:
    check_run(executed[1])


@pytest.mark.real_data
def test_its_outputs_are_those_that_are_stored(executed: tuple[Path, Any], movielens_path: Path) -> None:
    check_outputs(*executed)
