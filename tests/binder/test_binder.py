"""binder/ builds as repo2docker builds it, small enough for Binder, and the first notebooks run there."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.binder.building import ROOT, Container, Plan, build, plan
from tests.binder.watching import Watch, proportional_bytes
from tests.browser.lab_server import address_of, notebook_page, run_all, wait_for
from tests.launcher.waiting import left
from tests.patience import scaled, wait_until

LIMIT = 2 * 2**30  # bytes of memory that Binder gives at most
NOTEBOOKS = sorted(path.name for path in (ROOT / "notebooks").glob("*.ipynb"))
RUN_HERE = [name for name in NOTEBOOKS if name.startswith(("00", "01"))]


@pytest.fixture(scope="module")
def wanted() -> Plan:
    return plan(ROOT)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Container:
    """Where RECSHARD_BINDER says that ``python -m tests.binder.building`` has built it, or built now."""
    there = os.environ.get("RECSHARD_BINDER")
    folder = Path(there) if there else tmp_path_factory.mktemp("binder") / "container"
    if not there:
        build(folder)
    return Container(folder)


@contextmanager
def server(container: Container, start: str, command: str) -> Iterator[tuple[str, str, Watch]]:
    """The server as Binder starts it, behind ``start``; its address, its token, and a watch over all its processes."""
    token = secrets.token_hex(16)
    runtime = container.folder / f"runtime-{token}"
    arguments = ["--ip=127.0.0.1", "--ServerApp.port=0", f"--IdentityProvider.token={token}"]
    arguments += ["--no-browser", "--LabApp.expose_app_in_browser=True"]
    arguments += ["--allow-root"] if os.geteuid() == 0 else []
    ratings = {name: value for name, value in os.environ.items() if name == "RECSHARD_MOVIELENS"}  # no network here
    log = container.folder / "server.log"
    with log.open("w") as out:
        process = subprocess.Popen(
            [behind(container, start), "jupyter", command, *arguments],
            env={**container.variables(), **ratings, "JUPYTER_RUNTIME_DIR": str(runtime)},
            cwd=container.home,
            stdout=out,
            stderr=out,
        )
    with Watch(process.pid) as watch:
        try:
            address = address_of(runtime, process, log)
            wait_for(f"{address}/api/status?token={token}", process, log)
            yield address, token, watch
        finally:
            process.terminate()
            try:
                process.wait(scaled(20))
            finally:
                alive = left(watch.processes())
                commands = [other.cmdline() for other in alive]
                for other in alive:
                    other.kill()
    assert [words for words in commands if words[-1:] != ["warm.py"]] == []  # that ends by itself


def behind(container: Container, start: str) -> str:
    return start.replace("${REPO_DIR}", str(container.home))


@pytest.fixture(scope="module")
def lab(built: Container, wanted: Plan) -> Iterator[tuple[str, str, Watch]]:
    """JupyterLab, one for all notebooks as a reader has it: the kernels of those that were run stay."""
    with server(built, wanted.start, "lab") as running:
        yield running


def first_page(address: str, token: str) -> str:
    with urllib.request.urlopen(f"{address}/?token={token}") as answer:
        return str(answer.url).removeprefix(address).split("?")[0]


def test_repo2docker_takes_the_files_for_what_they_are_meant(wanted: Plan) -> None:
    assert (wanted.buildpack, wanted.python) == ("PythonBuildPack", "3.11")
    assert wanted.early == ['${KERNEL_PYTHON_PREFIX}/bin/pip install --no-cache-dir -r "binder/requirements.txt"']
    assert wanted.early_files == ["binder/requirements.txt"]  # torch's layer outlives changes of the checkout
    assert (wanted.late, wanted.post_build) == ([], ["binder/postBuild"])
    assert wanted.start == "${REPO_DIR}/binder/start"
    assert all(os.access(ROOT / "binder" / name, os.X_OK) for name in ("postBuild", "start"))


@pytest.mark.nightly
def test_its_torch_is_the_one_that_fbgemm_was_built_for(built: Container) -> None:
    (line,) = [line for line in (ROOT / "binder/requirements.txt").read_text().splitlines() if line.startswith("torch")]
    pinned = (ROOT / "pyproject.toml").read_text().count(f'"{line.removesuffix("+cpu")}"')
    assert pinned >= 2  # [cpu] and [cuda]
    told = built.shell("python -c 'import torch, fbgemm_gpu; print(torch.__version__, torch.version.cuda)'")
    assert told.split() == [line.split("==")[1], "None"]
    assert "nvidia" not in built.shell("pip list").lower()
    assert "No broken requirements" in built.shell("pip check")


@pytest.mark.nightly
def test_it_was_built_within_the_limit(built: Container) -> None:
    steps = json.loads((built.folder / "build.json").read_text())
    disk = steps.pop("all")["disk_bytes"]
    assert len(steps) == 3
    assert all(10 * 2**20 < step["peak_bytes"] < LIMIT for step in steps.values())
    assert disk < 2.5e9


@pytest.mark.nightly
def test_the_loops_are_compiled_already(built: Container) -> None:
    told = built.shell(
        "python -c 'import sys; from recshard_lab.embedding.kernels.numba.compiled import why_absent;"
        'print(why_absent(), "numba" in sys.modules)\''
    )
    assert told.split() == ["None", "False"]  # they were loaded; to compile them would have imported numba


@pytest.mark.nightly
def test_binders_server_opens_on_the_first_notebook_and_asks_nothing(lab: tuple[str, str, Watch]) -> None:
    address, token, _ = lab
    assert first_page(address, token) == f"/lab/tree/notebooks/{NOTEBOOKS[0]}"
    with urllib.request.urlopen(f"{address}/lab/api/settings?token={token}") as answer:
        settings = {entry["id"]: entry for entry in json.load(answer)["settings"]}
    notices = settings["@jupyterlab/apputils-extension:notification"]["schema"]["properties"]
    assert (notices["fetchNews"]["default"], notices["checkForUpdates"]["default"]) == ("false", False)
    tabs = settings["@jupyterlab/notebook-extension:tracker"]["schema"]["properties"]
    assert tabs["kernelShutdown"]["default"] is True


@pytest.mark.browser
@pytest.mark.parametrize("name", RUN_HERE)
@pytest.mark.nightly
def test_a_notebook_runs_there_within_the_limit(lab: tuple[str, str, Watch], name: str) -> None:
    address, token, watch = lab
    with notebook_page(address, token, f"notebooks/{name}") as page:
        run_all(page)
        told = [f'[data-mime-type="application/vnd.jupyter.{kind}"]' for kind in ("stderr", "error")]
        assert page.locator(", ".join(told)).all_inner_texts() == []
        prompts = page.locator(".jp-CodeCell .jp-InputPrompt").all_inner_texts()
        assert all(prompt.strip("[]: ").isdigit() for prompt in prompts)
    assert 200 * 2**20 < watch.peak < LIMIT
    assert watch.samples > 20


def test_the_watch_sees_memory_that_a_grandchild_takes() -> None:
    hold = "import sys; held = b'x' * (300 << 20); print('held', flush=True); sys.stdin.read()"
    command = ["bash", "-c", 'python3 -c "$1"; exit', "bash", hold]
    with (
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process,
        Watch(process.pid) as watch,
    ):
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        there = sum(proportional_bytes(other.pid) for other in watch.processes())
        samples = watch.samples
        wait_until(lambda: watch.samples > samples + 1)
        process.communicate("")
    assert 300 * 2**20 <= there <= watch.peak + 2**20 < 340 * 2**20
