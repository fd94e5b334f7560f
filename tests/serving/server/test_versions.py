"""Versions: the newest is served, the swap loses nothing, the old model is freed, a broken one is refused."""

import asyncio
import gc
import json
import os
import shutil
import weakref
from pathlib import Path
from typing import Any

import pytest

from recshard_lab.serving.server import ServeError, Server, ServerConfig, serve
from recshard_lab.serving.server.log import Log
from recshard_lab.serving.server.metrics import Metrics
from recshard_lab.serving.server.versions import Versions, find_versions
from tests.patience import wait_until
from tests.serving.server.stub import LOADER, request, write
from tests.serving.server.traffic import ROUNDS, Traffic


def versions(folder: Path) -> Versions:
    return Versions(ServerConfig(str(folder), loader=LOADER), Metrics(), Log("warning"))


def name_of(served: Versions) -> str:
    assert served.current is not None
    return served.current.name


def test_the_newest_complete_version_is_found(tmp_path: Path) -> None:
    for name in ("v9", "v10", "v2"):
        write(tmp_path, name)
    (tmp_path / "v11").mkdir()  # without model.json
    (tmp_path / ".v12").mkdir()
    (tmp_path / ".v12" / "model.json").write_text("{}")
    (tmp_path / "v13").write_text("a file")
    assert [path.name for path in find_versions(tmp_path)] == ["v10", "v9", "v2"]
    assert find_versions(tmp_path / "v2") == [tmp_path / "v2"]
    for path in (tmp_path / "v11", tmp_path / "v13", tmp_path / "none"):
        with pytest.raises(FileNotFoundError, match="Fix: "):
            find_versions(path)


@pytest.mark.gate
def test_a_new_version_replaces_the_old_one_which_is_freed(folder: Path) -> None:
    served = versions(folder)
    assert served.refresh() == []
    assert served.current is not None
    old = weakref.ref(served.current.model)
    first = served.current
    assert served.refresh() == []
    assert served.current is first
    del first
    write(folder, "v2")
    served.refresh()
    gc.collect()
    assert name_of(served) == "v2"
    assert old() is None
    shutil.rmtree(folder / "v2")  # a rollback
    served.refresh()
    assert name_of(served) == "v1"
    shutil.rmtree(folder / "v1")
    write(folder, "v1", scale=4.0)  # the same name, other content
    served.refresh()
    assert served.current is not None
    assert served.current.model.options == {"scale": 4.0}  # type: ignore[attr-defined]


def test_a_broken_version_is_refused_once_and_the_old_one_is_served(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    served = versions(folder)
    write(folder, "v2", broken=True)
    (found,) = served.refresh()
    assert "version 'v2' was refused: ValueError: this version is broken" in found
    assert name_of(served) == "v1"
    assert served.refresh() == []  # not again at each look
    assert len(served.refresh(retry=True)) == 1
    lines = [json.loads(line) for line in capfd.readouterr().err.splitlines()]
    assert [(line["event"], line["version"], line["serving"]) for line in lines] == [
        ("version_refused", "v2", None),
        ("version_refused", "v2", "v1"),
    ]
    write(folder, "v3")
    served.refresh()
    assert name_of(served) == "v3"


@pytest.mark.gate
def test_reload_answers_with_the_version_or_why_it_was_refused(folder: Path) -> None:
    with serve(folder, token="t", loader=LOADER, watch_s=0, drain_s=0) as server, server.client() as client:
        write(folder, "v2", scale=2.0)
        assert client.predict(**request())["probability"] == [12.0]
        assert client.reload() == "v2"
        assert client.predict(**request())["probability"] == [24.0]
        write(folder, "v3", broken=True)
        with pytest.raises(ServeError, match=r"'v3' was refused.*'v2' is still served") as caught:
            client.reload()
        assert caught.value.status == 409
        assert client.predict(**request())["probability"] == [24.0]
        metrics = client.metrics()
        assert metrics['recshard_swaps_total{result="refused"}'] == 1
        assert metrics['recshard_version{version="v2"}'] == 1
        assert metrics['recshard_version{version="v1"}'] == 0


def test_swaps_under_load_lose_no_request_and_mix_no_versions(folder: Path) -> None:
    scales = {f"v{number}": float(number) for number in range(1, 6 * ROUNDS + 2)}
    broken = {f"v{6 * number + 5}" for number in range(ROUNDS)}

    async def test(server: Server) -> Traffic:
        async with Traffic(server.address, 16, scales) as traffic:
            await traffic.version("v1")
            for name in [*scales][1:]:
                write(folder, name, scale=scales[name], broken=name in broken)
                if name in broken:
                    await traffic.answered(300)
                else:
                    await traffic.version(name)
        return traffic

    with serve(folder, loader=LOADER, watch_s=0.05, drain_s=0, log_level="warning") as server:
        traffic = asyncio.run(test(server))
        assert set(traffic.statuses) == {200}
        assert (traffic.lost, traffic.refused, traffic.wrong) == (0, 0, [])
        assert set(traffic.versions) == set(scales) - broken
        with server.client() as client:
            metrics: dict[str, Any] = client.metrics()
        assert metrics["recshard_queue_requests"] == 0
        assert metrics['recshard_swaps_total{result="loaded"}'] == 5 * ROUNDS + 1


def test_a_folder_that_vanishes_does_not_end_the_server(folder: Path) -> None:
    with serve(folder, loader=LOADER, watch_s=0.05, drain_s=0) as server, server.client() as client:
        os.rename(folder, folder.with_name("away"))
        wait_until(lambda: "watch_failed" in server.log_path.read_text())
        assert client.predict(**request())["probability"] == [12.0]
        os.rename(folder.with_name("away"), folder)
        write(folder, "v2", scale=2.0)
        wait_until(lambda: client.predict(**request())["probability"] == [24.0])
