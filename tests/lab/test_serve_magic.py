"""`%recshard_serve` in a real ipykernel, with a real server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch

from recshard_lab.embedding import EmbeddingBagCollection, EmbeddingBagConfig
from recshard_lab.models import DLRM
from recshard_lab.serving import Inputs, save_bundle
from tests.lab.test_magics import Notebook, gone

pytestmark = pytest.mark.timeout(120)
ASK = "print(list(server.client().predict(dense={'age': [.1]}, sparse={'movie': [[1, 5]]})))"


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders ``v1`` and ``v2`` with bundles, ``damaged`` with a cut program, ``empty``."""
    folder = tmp_path_factory.mktemp("bundles")
    tables = [EmbeddingBagConfig(100, 8, "movies", feature_names=["movie"])]
    model = DLRM(EmbeddingBagCollection(tables), 1, [8, 8], [8, 1]).eval()
    inputs = Inputs.of(model, dense=["age"])
    for name in ("v1", "v2", "damaged"):
        save_bundle(model, folder / name, inputs=inputs, outputs={"probability": torch.sigmoid})
    (folder / "damaged" / "program.pt2").write_text("cut")
    (folder / "empty").mkdir()
    return folder


@pytest.fixture(scope="module")
def notebook() -> Iterator[Notebook]:
    notebook = Notebook()
    notebook.ok("%load_ext recshard_lab")
    yield notebook
    notebook.close()


def running_server(notebook: Notebook) -> psutil.Process:
    return psutil.Process(int(notebook.ok("print(server.pid)").stdout))


@pytest.mark.nightly
def test_a_server_is_started_replaced_and_stopped(notebook: Notebook, bundles: Path) -> None:
    assert "no server is running" in notebook.ok("%recshard_serve").stdout
    assert "nothing to stop" in notebook.ok("%recshard_serve --stop").stdout
    told = notebook.ok(f"%recshard_serve {bundles / 'v1'}").stdout
    assert "http://127.0.0.1:" in told
    assert "serves v1" in told
    assert notebook.ok(ASK).stdout == "['probability']\n"
    assert "1 request answered" in notebook.ok("%recshard_serve").stdout
    first = running_server(notebook)

    for path, why in (("empty", "contains no bundle"), ("damaged", "program.pt2 is truncated"), ("x", "not a folder")):
        refused = notebook.run(f"%recshard_serve {bundles / path}").stderr
        assert "UsageError: %recshard_serve: " in refused
        assert why in refused
        assert "Traceback" not in refused
    assert notebook.ok(ASK).stdout == "['probability']\n"  # the server before goes on

    told = notebook.ok(f"%recshard_serve {bundles / 'v2'}").stdout
    assert "serves v2" in told
    second = running_server(notebook)
    assert gone([first], within=5)
    assert notebook.ok("%recshard_serve --stop").stdout.endswith("stopped.\n")
    assert gone([second], within=5)
    notebook.ok(f"%recshard_serve {bundles / 'v1'}")
    third = running_server(notebook)
    notebook.ok("%unload_ext recshard_lab\n%load_ext recshard_lab")
    assert gone([third], within=15)


def test_a_variable_of_that_name_is_not_overwritten(notebook: Notebook, bundles: Path) -> None:
    notebook.ok("%recshard_serve --stop\nserver = 7")
    refused = notebook.run(f"%recshard_serve {bundles / 'v1'}").stderr
    assert "UsageError: %recshard_serve: the notebook's variable 'server' (int) would be overwritten." in refused
    assert "Fix: rename it" in refused
    assert notebook.ok("print(server)\ndel server").stdout == "7\n"
    assert "no server is running" in notebook.ok("%recshard_serve").stdout


@pytest.mark.gate
def test_a_server_does_not_outlive_its_kernel(notebook: Notebook, bundles: Path) -> None:
    notebook.ok(f"%recshard_serve {bundles / 'v1'}")
    server = running_server(notebook)
    psutil.Process(notebook.manager.provisioner.pid).kill()
    assert gone([server], within=15)
