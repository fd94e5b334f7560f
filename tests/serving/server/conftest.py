"""A server for the tests of a module, and folders of stub versions."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from recshard_lab.serving.server import Server, serve
from recshard_lab.serving.server.spawn import Inherited
from tests.serving.server import forked
from tests.serving.server.stub import LOADER, write

READ_TIMEOUT_S = 0.6
MAX_BODY_MB = 0.05


_REAL = Inherited.start


@pytest.fixture(scope="session", autouse=True)
def forked_servers() -> Iterator[None]:
    """Servers of these tests are forked from one process, which saves the time of imports."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Inherited, "start", forked.start)
        yield


@pytest.fixture
def real_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers of this test are started as users start them."""
    monkeypatch.setattr(Inherited, "start", _REAL)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A process that serves version v1, with short limits and without a token."""
    folder = tmp_path_factory.mktemp("model")
    write(folder, "v1")
    options = {"read_timeout_s": READ_TIMEOUT_S, "max_body_mb": MAX_BODY_MB, "max_samples": 50}
    with serve(folder, loader=LOADER, watch_s=0, drain_s=0.1, **options) as running:
        yield running


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with version v1 of scale 1."""
    write(tmp_path / "model", "v1", scale=1.0)
    return tmp_path / "model"
