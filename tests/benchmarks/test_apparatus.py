"""Apparatus of the launchers' figures: real kernels, private networks, temporary environments."""

from __future__ import annotations

import math
import os
import socket
import tempfile
import venv
from pathlib import Path

import pytest
from typer.testing import CliRunner

import benchmarks
from benchmarks import Figure, launch_peers
from benchmarks.apparatus import environments
from benchmarks.apparatus.dumps import dump_figures
from benchmarks.apparatus.environments import PeerEnv
from benchmarks.apparatus.kernel import Kernel
from benchmarks.apparatus.peers import Recipe
from recshard_lab.cli import app

NEEDS_NETWORK = pytest.mark.needs("unshare", "user namespaces")

PLAIN = Recipe("plain", "", "import os", "print('sum 4.0')", "pass")


@pytest.mark.nightly
def test_a_kernel_answers_with_its_words_its_errors_and_its_time() -> None:
    with Kernel() as kernel:
        assert kernel.ok("print('hi')").text == "hi\n"
        assert kernel.ok("import time; time.sleep(0.2)").seconds >= 0.2
        assert "ZeroDivisionError" in kernel.run("1 / 0").error
        with pytest.raises(RuntimeError, match="ZeroDivisionError"):
            kernel.ok("1 / 0")
        with pytest.raises(TimeoutError, match=r"0.1 s"):
            kernel.run("time.sleep(0.5)", timeout=0.1)


@pytest.mark.nightly
def test_a_process_that_left_the_kernels_session_is_ended_with_it() -> None:
    with Kernel() as kernel:
        kernel.ok(
            "import subprocess, sys\nsubprocess.Popen([sys.executable, '-c', 'import time; time.sleep(99)'], "
            "start_new_session=True)"
        )
        (child,) = kernel.family()
        folder = kernel.folder
    assert not child.is_running()
    assert not kernel.process.is_running()
    assert not os.path.exists(folder)


@pytest.mark.nightly
@NEEDS_NETWORK
def test_what_listens_on_every_interface_of_an_isolated_kernel_is_heard_only_inside() -> None:
    with Kernel(isolated=True) as kernel:
        port = int(
            kernel.ok(
                "import socket\ns = socket.create_server(('0.0.0.0', 0))\nport = s.getsockname()[1]\n"
                "socket.create_connection(('127.0.0.1', port), timeout=2).close()\nprint(port)"
            ).text
        )
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port), timeout=2)


@pytest.mark.nightly
def test_a_kernel_that_does_not_start_says_why() -> None:
    with tempfile.TemporaryDirectory() as bare:
        venv.create(bare)
        kernel = Kernel(f"{bare}/bin/python")
        with pytest.raises(RuntimeError, match="No module named ipykernel_launcher"), kernel:
            pass
    assert not os.path.exists(kernel.folder)


@pytest.mark.nightly
def test_an_environment_names_what_could_not_be_installed_and_is_gone_at_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[list[str]] = []

    def pip(self: PeerEnv, requirements: list[str]) -> str:
        asked.append(requirements)
        return "ERROR: no matching distribution" if requirements[0] == "gone==1.0" else ""

    monkeypatch.setattr(PeerEnv, "install", pip)
    with PeerEnv(["there==2.0", "gone==1.0"]) as peers:
        assert peers.missing == {"gone": "ERROR: no matching distribution"}
        assert Path(peers.python).exists()
        folder = peers.folder
    assert not os.path.exists(folder)
    torch = next(requirement for requirement in environments.base_requirements() if requirement.startswith("torch"))
    assert all(torch in requirements for requirements in asked)


@pytest.mark.nightly
@NEEDS_NETWORK
def test_a_launcher_that_fails_is_told_and_the_others_are_measured(capsys: pytest.CaptureFixture[str]) -> None:
    wrong = Recipe("wrong", "", "", "print('sum 3.0')", "pass")
    figures = launch_peers.side_by_side([wrong, PLAIN], "", rounds=1)
    assert {figure.name.split(": ")[1] for figure in figures} == {"plain"}
    assert all(figure.value > 0 for figure in figures if figure.unit != "MB")
    assert "FAILED in this round: wrong" in capsys.readouterr().err


def test_with_peers_adds_their_figures_to_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = [Figure("ours", 1.0, "s", target=2.0)], [Figure("theirs", math.pi, "s")]
    fakes = {"launch": ours, "launch_peers": theirs}
    monkeypatch.setattr(benchmarks, "benchmark_named", lambda name: benchmarks.Benchmark(name, "", lambda: fakes[name]))
    assert "theirs" not in CliRunner().invoke(app, ["bench", "launch"]).output
    done = CliRunner().invoke(app, ["bench", "launch", "--with-peers", "--check"])
    assert done.exit_code == 0
    assert "3.142 s" in done.output


@pytest.mark.gate
def test_the_figures_of_dumps_count_the_bytes_of_files_beside_those_of_rows() -> None:
    full, delta, load, one = dump_figures(4000)
    assert [figure.unit for figure in (full, delta, load, one)] == ["MB/s"] * 4
    assert 512 < full.beside["bytes a row"] < 600
    assert delta.name == "delta of 40 rows on 2 ranks"
    assert full.beside["raw bytes a row"] == delta.beside["raw bytes a row"] == 512
    assert min(figure.value for figure in (full, delta, load, one)) > 0
