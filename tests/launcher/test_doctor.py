"""What the doctor says of a machine, this one and others made up piece by piece."""

from __future__ import annotations

import os
import resource
import shutil
import socket
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from recshard_lab import cores
from recshard_lab.launcher import doctor
from recshard_lab.launcher.doctor import Finding, inspect

HERE = doctor.version_of


def installed(monkeypatch: pytest.MonkeyPatch, **versions: str | None) -> None:
    """Lets packages seem installed in other versions, or not at all; ``_`` for ``-``."""
    other = {name.replace("_", "-"): version for name, version in versions.items()}
    monkeypatch.setattr(doctor, "version_of", lambda name: other[name] if name in other else HERE(name))


def only(findings: list[Finding]) -> Finding:
    (finding,) = findings
    return finding


def test_on_the_machine_of_these_tests_nothing_needed_is_missing() -> None:
    findings = inspect()
    assert [finding for finding in findings if finding.ok is False] == []
    assert len({finding.name for finding in findings}) == len(findings)
    names = "system cores memory loopback torch Gloo NCCL fbgemm jupyterlab ipywidgets anywidget plotly ipykernel"
    assert {*names.split(), "shared memory", "open files", "cache"} <= {finding.name for finding in findings}


def test_a_check_that_raises_is_a_finding_and_the_others_still_run() -> None:
    def strange_sensor() -> list[Finding]:
        raise PermissionError("not yours")

    broken, kept = inspect([strange_sensor, lambda: [Finding("next", "fine", True)]])
    assert (broken.name, broken.value, broken.ok) == ("strange sensor", "PermissionError: not yours", False)
    assert kept.ok


def test_without_torch_the_finding_says_so_and_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)  # import torch raises ModuleNotFoundError
    found = only(doctor.torch_and_backends())
    assert found.ok is False
    assert "ModuleNotFoundError" in found.value
    assert "torch==" in str(found.fix)


def test_fbgemm_may_be_absent_but_two_builds_overwrite_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, torch="2.13.0+cpu", **dict.fromkeys(doctor.FBGEMM_BUILDS))
    found = only(doctor.fbgemm())
    assert (found.ok, found.fix) == (None, "pip install fbgemm-gpu-cpu==1.8.0")
    installed(monkeypatch, fbgemm_gpu="1.8.0", fbgemm_gpu_cpu="1.8.0")
    found = only(doctor.fbgemm())
    assert found.ok is False
    assert "fbgemm-gpu 1.8.0 and fbgemm-gpu-cpu 1.8.0" in found.value
    assert "pip uninstall -y fbgemm-gpu fbgemm-gpu-cpu" in str(found.fix)


@pytest.mark.gate
@pytest.mark.parametrize(
    ("torch", "build", "source", "words"),
    [
        ("2.14.1", "1.8.0", "raise OSError('undefined symbol')", "fbgemm-gpu-cpu==1.9.0"),
        ("2.13.0", "1.8.0", "import os; os.abort()", "ended with code -6"),
        ("2.13.0", "1.8.0", "", "asynchronous_complete_cumsum"),  # imports, but brings no operators
    ],
)
def test_an_fbgemm_that_cannot_be_imported_is_shown_with_the_one_that_matches_even_if_it_crashes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, torch: str, build: str, source: str, words: str
) -> None:
    (tmp_path / "fbgemm_gpu.py").write_text(source)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    installed(monkeypatch, torch=torch, fbgemm_gpu_cpu=build, fbgemm_gpu=None)
    found = only(doctor.fbgemm())
    assert found.ok is False
    assert words in f"{found.value} {found.fix}"


def test_a_package_that_is_too_old_is_compared_with_what_this_one_asks_for(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, plotly="5.24.1", ipywidgets=None)
    by_name = {finding.name: finding for finding in doctor.lab_packages()}
    assert by_name["plotly"].value == "5.24.1, needs 6.0"
    assert (by_name["ipywidgets"].ok, by_name["ipywidgets"].fix) == (False, "pip install ipywidgets")
    assert by_name["jupyterlab"].ok is True


@pytest.mark.parametrize(("version", "answers"), [("6.31.0", 0), ("7.0.0", 0), ("7.0.1", 1), ("7.4.0rc1", 1)])
def test_widgets_answer_during_a_busy_cell_in_some_releases_of_ipykernel(
    monkeypatch: pytest.MonkeyPatch, version: str, answers: int
) -> None:
    installed(monkeypatch, ipykernel=version)
    found = only(doctor.busy_widgets())
    assert found.ok is (True if answers else None)
    assert (found.fix is None) is bool(answers)


def test_a_cache_that_cannot_be_written_names_the_variable_that_moves_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    cache, temporary = doctor.folders()
    assert cache.ok is False
    assert "XDG_CACHE_HOME" in str(cache.fix)
    assert temporary.ok is True
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert doctor.folders()[0].value.startswith("~/cache/recshard_lab, ")


@pytest.mark.parametrize(
    ("check", "function"), [(doctor.loopback, "create_server"), (doctor.unix_sockets, "socketpair")]
)
def test_a_sandbox_without_sockets_is_found_out(
    monkeypatch: pytest.MonkeyPatch, check: Callable[[], list[Finding]], function: str
) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise OSError(1, "Operation not permitted")

    monkeypatch.setattr(socket, function, refuse)
    found = only(check())
    assert found.ok is False
    assert "Operation not permitted" in found.value
    assert found.fix


def test_small_shared_memory_and_few_open_files_are_told_with_the_command(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(total=2**26, free=2**26)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage)
    assert "--shm-size=1g" in str(only(doctor.shared_memory(str(tmp_path))).fix)
    assert only(doctor.shared_memory(str(tmp_path / "none"))).ok is None
    monkeypatch.setattr(resource, "getrlimit", lambda which: (256, 4096))
    assert (only(doctor.open_files()).ok, only(doctor.open_files()).value) == (None, "256 (at most 4096)")
    monkeypatch.setattr(resource, "getrlimit", lambda which: (64, 4096))
    assert only(doctor.open_files()).ok is False


def test_a_containers_limits_count_not_the_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = {"memory.max": str(2**30), "memory.current": str(900 * 2**20)}
    monkeypatch.setattr(cores, "_cgroup", lambda name: limits.get(name, ""))
    monkeypatch.setattr(doctor, "quota", lambda: 0.5)
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    assert only(doctor.cores()).value.endswith(" of 64 usable (0.5 by this container's quota)")
    assert only(doctor.memory()).value == "0.1 of 1.1 GB free"
    limits["memory.stat"] = f"anon 7\ninactive_file {800 * 2**20}\nfile 9"  # given back when it is needed
    assert only(doctor.memory()).value == "1.0 of 1.1 GB free"


def test_a_gpu_that_torch_cannot_use_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_nvidia_driver", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(torch.version, "cuda", None)
    found = next(finding for finding in doctor.torch_and_backends() if finding.name == "GPUs")
    assert "CPU build" in found.value
    assert "cuda" in str(found.fix)
