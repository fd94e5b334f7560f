"""The self-test reports what fails, goes on with the other checks, and passes on this machine's CPU."""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
import pytest
import torch

from recshard_lab import ShardingPlan, Topology, estimate
from recshard_lab.launcher import LaunchError, Shape
from recshard_lab.selftest import checkout, checks, on_ranks, run_checks
from recshard_lab.selftest.checks import Check, Launched, Seen, Way
from recshard_lab.sharding.schemes import scheme_names

GPUS = torch.cuda.device_count()
CPU = Way("CPU", 2, {"backend": "gloo"}, "cpu")
COMMAND = [sys.executable, "-m", "recshard_lab.cli", "selftest"]


@pytest.fixture
def launched() -> Iterator[Launched]:
    found = Launched()
    yield found
    found.stop()


@pytest.fixture
def one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch counts one GPU of 80 GB. Nothing can run on it."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda gpu: (80 * 10**9, 80 * 10**9))


class FakeRanks:
    """Ranks that return given results."""

    usable, local_world_size = True, 1

    def __init__(self, *results: Any) -> None:
        self.results, self.world_size = results, len(results)

    def run(self, *_: Any, **__: Any) -> list[Any]:
        return list(self.results)

    def stop(self) -> None:
        """Nothing runs."""


def faked(way: Way, *results: Any) -> Launched:
    found = Launched()
    found._way, found._ranks = way, FakeRanks(*results)  # type: ignore[assignment]
    return found


def results(*some: Check) -> dict[str, tuple[str, str]]:
    return {r.name: (r.status, r.detail) for r in run_checks(checks=some).results}


@pytest.mark.clock
def test_the_command_passes_on_this_machines_cpu_within_a_minute(tmp_path: Path) -> None:
    file = tmp_path / "cpu.md"
    done = subprocess.run([*COMMAND, "--out", str(file)], capture_output=True, text=True, check=False, timeout=150)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout == file.read_text()
    title, *lines = done.stdout.splitlines()
    assert re.fullmatch(r"# recshard selftest: \d+ checks passed, 0 not applicable", title)
    for scheme in scheme_names():
        assert any(line.startswith(f"| parity of {scheme}: 2 CPU ranks, Gloo | passed |") for line in lines)
    for fact in ("date", "cards", "driver", "torch", "NCCL", "lookup kernels"):
        assert any(line.startswith(f"- {fact}: ") for line in lines)
    seconds = [float(line.split(" | ")[2]) for line in lines if " | passed | " in line]
    assert sum(seconds) < 60


@pytest.mark.skipif(GPUS > 0, reason="there is a GPU")
def test_gpus_that_are_missing_are_an_error_that_names_the_reason() -> None:
    done = subprocess.run([*COMMAND, "--gpu"], capture_output=True, text=True, check=False, timeout=100)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert re.search(r"selftest --gpu found 0 GPUs: \w.*Fix: \w", done.stderr.replace("\n", " "))


@pytest.mark.gate
def test_a_scheme_with_a_wrong_result_fails_and_the_others_pass(launched: Launched) -> None:
    def wrong(launched: Launched, way: Way, scheme: str) -> Seen:
        """One rank looks up the unsharded rows of other ids while this scheme is checked."""
        source = "import recshard_lab.lab.live.on_ranks as live\nright = live.random_batch\n"
        source += "live.random_batch = lambda tables, load, rng: right(tables, load, rng) if rank else "
        source += "right(tables, load, type(rng)(type(rng.bit_generator)()))"
        ranks = launched.ranks(way)
        ranks.exec(source)
        try:
            return checks.check_parity(launched, way, scheme)
        finally:
            ranks.exec("live.random_batch = right")

    found = results(
        Check("row_wise", lambda: wrong(launched, CPU, "row_wise")),
        Check("table_wise", lambda: checks.check_parity(launched, CPU, "table_wise")),
    )
    assert found["row_wise"][0] == "failed"
    assert re.search(r"outputs differ from the unsharded tables by \d", found["row_wise"][1])
    assert found["table_wise"][0] == "passed"


def test_a_check_that_loses_its_ranks_does_not_end_the_others(launched: Launched) -> None:
    def lose() -> Seen:
        launched.ranks(CPU).exec("import os\nos._exit(7)", printer=checks._Quiet([0, 1]))
        return Seen()

    def leave() -> Seen:
        raise SystemExit(3)

    found = results(
        Check("lost", lose), Check("left", leave), Check("after", lambda: checks.check_launch(launched, CPU))
    )
    assert found["lost"][0] == found["left"][0] == "failed"
    assert "RankError" in found["lost"][1]
    assert found["after"] == ("passed", "on cpu")


def test_the_report_of_a_failure_is_readable_by_people_and_programs() -> None:
    def fail() -> Seen:
        raise RuntimeError("a | b\nand more")

    report = run_checks(checks=[Check("one", fail), Check("two", lambda: Seen("fine", {"speed": "3 GB/s"}))])
    assert not report.ok
    assert "# recshard selftest: 1 of 2 checks failed" in report.markdown()
    assert re.search(r"\| one \| \*\*failed\*\* \| 0\.\d \| RuntimeError: a \\\| b and more \|", report.markdown())
    assert "| two | speed | 3 GB/s |" in report.markdown()
    told = json.loads(report.as_json())
    assert [one["status"] for one in told["results"]] == ["failed", "passed"]
    assert told["ok"] is False


def test_with_a_gpu_every_scheme_is_checked_over_nccl_and_on_a_shared_gpu(one_gpu: None) -> None:
    names = [check.name for check in checks.all_checks(Launched(), gpu=True)]
    for way in ("2 CPU ranks, Gloo", "1 rank, NCCL", "2 ranks share a GPU"):
        assert [f"parity of {scheme}: {way}" in names for scheme in scheme_names()] == [True] * len(scheme_names())
        assert {f"{kind}: {way}" for kind in ("launch", "pipelines", "interrupt", "killed rank")} <= set(names)
    assert {f"{kind}: 1 rank, NCCL" for kind in ("CUDA graphs", "pinned copies", "bandwidth")} <= set(names)
    assert "tests marked cuda" in names
    notebooks = [path.stem for path in (Path(__file__).parents[2] / "notebooks").glob("*.ipynb")]
    assert len(notebooks) > 10
    for way in ("default ranks", "ranks share the GPU"):
        assert {f"notebook {name}: {way}" for name in notebooks} <= set(names)
    assert len(names) == len(set(names))


@pytest.mark.skipif(GPUS > 0, reason="there is a GPU")
def test_a_gpu_that_does_not_work_fails_each_of_its_checks(one_gpu: None) -> None:
    launched = Launched()
    report = run_checks(checks=[c for c in checks.all_checks(launched, gpu=True) if c.name.endswith("1 rank, NCCL")])
    assert len(report.results) > 12
    assert {result.status for result in report.results} == {"failed"}
    assert all(result.detail for result in report.results)


NCCL = Way("NCCL", 2, {}, "cuda")


@pytest.mark.parametrize(("factor", "status"), [(1.08, "passed"), (1.15, "failed"), (0.8, "failed")])
def test_an_allocator_that_holds_a_tenth_more_or_less_than_predicted_fails(
    one_gpu: None, factor: float, status: str
) -> None:
    def bytes_like(fn: Any, plan: str, tables: list[Any], workload: Any) -> list[dict[str, int]]:
        one = estimate(ShardingPlan.from_json(plan), tables, Topology(2, "cuda"), workload)
        held, peaks = one.memory_bytes[:, :2].sum(axis=1), one.memory_bytes.sum(axis=1)
        return [{"held": int(held[r]), "peak": int(peaks[r] * (factor if r else 1))} for r in (0, 1)]

    launched = faked(NCCL, None, None)
    launched._ranks.run = bytes_like  # type: ignore[union-attr, assignment]
    result = checks.run_check(Check("memory", lambda: checks.check_memory(launched, NCCL)))
    assert result.status == status, result
    assert ("peak of rank 1: " in result.detail) is (status == "failed")


def test_wrong_devices_sums_and_losses_fail_the_checks() -> None:
    for fact, message in (
        (("cpu", 3.0, True), "rank 1 is on cpu, expected cuda"),
        (("cuda:1", 2.0, True), "all_reduce returned 2.0 on rank 1"),
        (("cuda:1", 3.0, False), "a model on rank 1 is not on cuda:1"),
    ):
        with pytest.raises(RuntimeError, match=message):
            checks.check_launch(faked(NCCL, ("cuda:0", 3.0, True), fact), NCCL)
    right, wrong = [1.0, 0.5], [1.0, 0.51]
    with pytest.raises(RuntimeError, match=r"losses of Sparse differ from the plain loop by 2\.0e-02"):
        checks.check_pipelines(faked(NCCL, *[{"plain loop": right, "Sparse": wrong}] * 2), NCCL)
    found = {"recorded": ["over"], "plain": right, "graphed": wrong, "plain_ms": 2.0, "graphed_ms": 1.0}
    with pytest.raises(RuntimeError, match="losses of the model with graphs differ"):
        checks.check_graphs(faked(NCCL, found, found), NCCL)
    assert checks.check_graphs(faked(NCCL, *[found | {"graphed": right}] * 2), NCCL).figures["step"] == "2.00 ms"
    with pytest.raises(RuntimeError, match="nan"):
        checks.compare_losses("a", [float("nan")], [1.0])


def test_the_tests_of_a_checkout_fail_where_one_fails_or_none_runs(tmp_path: Path) -> None:
    source = "import pytest\n\n@pytest.mark.skip(reason='no card')\n@pytest.mark.cuda\ndef test_skipped(): pass\n"
    (tmp_path / "test_it.py").write_text(source + "def test_right(): pass\ndef test_wrong(): assert 1 == 2\n")
    with pytest.raises(RuntimeError, match=r"none of 1 tests ran.*"):
        checkout.check_tests(lambda: None, "cuda", str(tmp_path))
    with pytest.raises(RuntimeError, match=r"1 of 2 tests failed: .*test_wrong"):
        checkout.check_tests(lambda: None, "not cuda", str(tmp_path))


def test_a_notebook_runs_unchanged_with_the_variables_of_the_check(tmp_path: Path) -> None:
    source = "import os\nassert os.environ['RECSHARD_SHARE_GPU'] == '1'\nprint('2 ranks on CPU ready in 0.1 s')"
    path = tmp_path / "one.ipynb"
    nbformat.write(nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source)]), path)
    before = path.read_bytes()
    seen = checkout.check_notebook(lambda: None, path, checkout.SHARED)
    assert seen.detail == "1 cells; 2 ranks on CPU"
    assert path.read_bytes() == before
    result = checks.run_check(Check("without", lambda: checkout.check_notebook(lambda: None, path, {})))
    assert result.status == "failed"
    assert "KeyError" in result.detail


def test_a_variable_lets_notebooks_share_the_gpu(one_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RECSHARD_SHARE_GPU", "1")
    assert Shape.checked(2).devices == ("cuda:0", "cuda:0")
    assert Shape.checked(2, backend="gloo").devices == Shape.checked(2, devices="cpu").devices == ("cpu", "cpu")
    monkeypatch.setenv("RECSHARD_SHARE_GPU", "0")
    assert Shape.checked(2).devices == ("cpu", "cpu")
    monkeypatch.setenv("RECSHARD_SHARE_GPU", "yes")
    with pytest.raises(LaunchError, match=r"RECSHARD_SHARE_GPU='yes': expected 1 or 0. Fix:"):
        Shape.checked(2)


def test_a_wheel_has_neither_tests_nor_notebooks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(checkout.recshard_lab, "__file__", str(tmp_path / "recshard_lab" / "__init__.py"))
    found = results(*checkout.checkout_checks(lambda: None))
    assert {status for status, _ in found.values()} == {"not applicable"}
    assert all(f"this package is in {tmp_path}" in detail for _, detail in found.values())


def test_the_bytes_of_a_steps_rows_are_at_least_those_of_its_ids() -> None:
    tables = checks.parity_tables()
    few, many = (sum(checks.row_bytes(tables, on_ranks.Workload(64, ids))) for ids in (1.0, 50.0))
    assert few > 64 * 4 * (32 * 2 + 16 + 8) * 3
    rows = sum(table.num_embeddings * table.embedding_dim * 4 for table in tables)
    assert many < 64 * 52 * 4 * (32 * 2 + 16 + 8) + 4 * rows


def test_a_skipped_check_is_listed_and_not_run() -> None:
    ran: list[str] = []
    own = [checks.Check(name, lambda name=name: ran.append(name) or checks.Seen()) for name in ("one", "notebook 01")]
    report = checks.run_checks(checks=own, skip=["notebook"])
    assert ran == ["one"]
    assert [each.status for each in report.results] == ["passed", "skipped"]
    assert report.title == "recshard selftest: 1 checks passed, 0 not applicable, 1 skipped"
