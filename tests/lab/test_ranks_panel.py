"""RanksPanel on real ranks: what it shows is what they do, and its buttons do what they say."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from recshard_lab.lab import RanksPanel
from recshard_lab.launcher import RanksInterrupted, current, launch
from tests.patience import scaled, wait_until


@pytest.fixture
def panel() -> Iterator[RanksPanel]:
    made = RanksPanel(every_s=0.05)
    yield made
    made.close()
    ranks = current()
    if ranks is not None:
        ranks.stop()


def states(panel: RanksPanel) -> list[str]:
    return re.findall(r'data-state="([^"]*)"', panel.table.value)


def who_prints(panel: RanksPanel) -> set[str]:
    """Equal lines of all ranks are one line of "all", if they come at one time."""
    return set(re.findall(r"\[(\w+)\] at work", panel.printed.value))


def talk_and_wait() -> None:
    print("at work", flush=True)
    time.sleep(60)


def test_without_ranks_it_says_how_to_start_some(panel: RanksPanel) -> None:
    assert "%recshard_launch" in panel.table.value
    assert panel.stop_button.disabled
    assert panel.interrupt_button.disabled


def test_it_shows_work_output_and_death_and_its_buttons_interrupt_restart_and_stop(panel: RanksPanel) -> None:
    ranks = launch(2)
    wait_until(lambda: states(panel) == ["idle", "idle"])
    assert all(f">{pid}<" in panel.table.value for pid in ranks.pids)
    assert "idle" in panel.static()[0]
    assert not any(str(pid) in form for pid in ranks.pids for form in panel.static())
    stopped: list[BaseException] = []

    def cell() -> None:
        try:
            ranks.run(talk_and_wait)
        except RanksInterrupted as error:
            stopped.append(error)

    work = threading.Thread(target=cell)
    work.start()
    wait_until(lambda: states(panel) == ["running", "running"] and who_prints(panel) in ({"all"}, {"0", "1"}))
    assert ranks.output(1)[0].endswith("] at work")
    with pytest.raises(ValueError, match="at least 1"):
        ranks.output(0)
    panel.interrupt_button.click()
    work.join()
    assert stopped
    wait_until(lambda: states(panel) == ["idle", "idle"])
    assert ranks.run(os.getpid) == ranks.pids

    before = ranks.pids
    wait_until(lambda: not panel.restart_button.disabled)
    panel.restart_button.click()
    wait_until(lambda: "Fresh ranks" in panel.message.value)
    assert not set(before) & set(ranks.pids)
    os.kill(ranks.pids[1], signal.SIGKILL)
    wait_until(lambda: "idle" not in states(panel)[1:] and len(states(panel)) == 2 and not panel.stop_button.disabled)
    assert "✗" in panel.table.value

    processes = [psutil.Process(pid) for pid in ranks.pids if psutil.pid_exists(pid)]
    panel.stop_button.click()
    wait_until(lambda: "No ranks are running" in panel.table.value)
    _, alive = psutil.wait_procs(processes, timeout=scaled(20))
    assert not alive


def test_it_shows_memory_by_use_and_the_capacity_of_ranks_that_have_one(panel: RanksPanel, tmp_path: Path) -> None:
    ranks = launch(2, memory_gb=0.05)
    ranks.exec("layer = torch.nn.Linear(999, 1000)\nrest = torch.zeros(1_000_000)")
    wait = f"import pathlib, time\nwhile not pathlib.Path({str(tmp_path / 'seen')!r}).exists(): time.sleep(0.01)"
    cell = threading.Thread(target=ranks.exec, args=(wait,))
    cell.start()  # memory is read while a cell runs
    wait_until(lambda: ">activations</th>" in panel.table.value)
    assert cell.is_alive()
    for words in ("<td>8 MB</td>", "<td>50 MB</td>", "weights: 4 MB", "activations: 4 MB", "counted as on a GPU"):
        assert words in panel.table.value
    assert "Memory: all tensors of a rank" in panel.exportable().sections[0].parts[1]
    (tmp_path / "seen").touch()
    cell.join()
    ranks.stop()
    wait_until(lambda: "No ranks are running" in panel.table.value)
    launch(1)
    wait_until(lambda: "memory (PSS)" in panel.table.value)
    assert ">capacity</th>" not in panel.table.value


def test_ranks_on_one_gpu_share_one_line_about_it() -> None:
    from recshard_lab.lab.widgets.ranks_panel import _notes
    from recshard_lab.launcher.device_memory import RankMemory, with_rest

    one = RankMemory(0, "cuda:0", "allocator", 10**9, 2 * 10**9, gpu="a", gpu_used=5 * 10**9, gpu_total=8 * 10**9)
    source, whole, process = _notes(with_rest([one, RankMemory(**{**vars(one), "rank": 1, "process": 2 * 10**9})]))
    assert "torch's allocator" in source
    assert whole.startswith("cuda:0: 5 GB of 8 GB in use, of which 3 GB outside the allocators of ranks 0-1:")
    assert process == "Rank 1's process uses 2 GB of cuda:0."
