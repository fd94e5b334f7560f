"""One kernel for the notebooks of a test file."""

from collections.abc import Iterator

import pytest
from nbclient import NotebookClient

from tests.notebooks.runs import kernel


@pytest.fixture(scope="module")
def client() -> Iterator[NotebookClient]:
    with kernel() as started:
        yield started
