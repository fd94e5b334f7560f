"""The magics in a real ipykernel, driven as Jupyter drives it: messages in, messages out, real signals."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest
from jupyter_client.blocking.client import BlockingKernelClient
from jupyter_client.manager import KernelManager

from tests.launcher.test_cold_launch import INTERRUPTS
from tests.patience import scaled, wait_until

pytestmark = pytest.mark.timeout(120)


@dataclass
class Said:
    """What one cell sent back."""

    stdout: str = ""
    stderr: str = ""
    error: str = ""
    name: str = ""
    data: list[dict[str, Any]] = field(default_factory=list)


class Notebook:
    def __init__(self) -> None:
        self.manager = KernelManager(kernel_name="python3")
        self.manager.start_kernel()
        self.client: BlockingKernelClient = self.manager.client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=scaled(60))

    def send(self, source: str) -> str:
        return self.client.execute(source)

    def hear(self, number: str, until: str = "", until_display: str = "") -> Said:
        said = Said()
        while True:
            message = self.client.get_iopub_msg(timeout=scaled(60))
            if message["parent_header"].get("msg_id") != number:
                continue
            content = message["content"]
            match message["msg_type"]:
                case "stream":
                    setattr(said, content["name"], getattr(said, content["name"]) + content["text"])
                case "error":
                    said.error, said.name = "\n".join(content["traceback"]), content["ename"]
                case "display_data" | "execute_result" | "update_display_data":
                    said.data.append(content["data"])
                case "status" if content["execution_state"] == "idle":
                    break
            if until and until in said.stdout:
                break
            if until_display and any(until_display in data["text/plain"] for data in said.data):
                break
        return said

    def run(self, source: str) -> Said:
        return self.hear(self.send(source))

    def ok(self, source: str) -> Said:
        said = self.run(source)
        assert not said.error, said.error
        return said

    def complete(self, source: str) -> list[str]:
        """What the Tab key offers at the end of `source`."""
        reply = self.client.complete(source, reply=True, timeout=scaled(60))["content"]
        return sorted(reply["matches"])

    def close(self) -> None:
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=True)
        self.manager.cleanup_resources()


@pytest.fixture(scope="module")
def kernel() -> Iterator[Notebook]:
    notebook = Notebook()
    notebook.ok("%load_ext recshard_lab")
    yield notebook
    notebook.close()


@pytest.fixture
def notebook(kernel: Notebook) -> Iterator[Notebook]:
    """Two fresh ranks."""
    kernel.ok("%recshard_launch -n 2")
    yield kernel
    kernel.ok("%recshard_stop")


def family(pid: int) -> list[psutil.Process]:
    """A kernel's forkserver and ranks."""
    return psutil.Process(pid).children(recursive=True)


def gone(processes: list[psutil.Process], within: float) -> bool:
    """Waits until all have ended, reaped or not."""

    def lives(process: psutil.Process) -> bool:
        with suppress(psutil.NoSuchProcess):
            return bool(process.status() != psutil.STATUS_ZOMBIE)
        return False

    wait_until(lambda: not any(map(lives, processes)), within)
    return True


def test_a_cell_runs_on_every_rank_and_what_they_agree_on_is_shown_once(notebook: Notebook) -> None:
    said = notebook.ok("%%recshard\nprint('rank', rank)\nprint('same')\nworld_size * 10")
    assert sorted(said.stdout.splitlines()) == ["[0] rank 0", "[1] rank 1", "[all] 20", "[all] same"]


def test_a_cell_can_run_on_some_ranks(notebook: Notebook) -> None:
    assert notebook.ok("%%recshard --ranks 1\nrank").stdout == "[1] 1\n"
    assert "expected some of 0 to 1" in notebook.run("%%recshard --ranks 1,7\nrank").error


def test_options_that_mean_nothing_are_refused(notebook: Notebook) -> None:
    for option, words in (
        ("--timeout 0", "'0' is not a time limit: expected seconds above 0"),
        ("--timeout nan", "'nan' is not a time limit"),
        ("--ranks=-1", "'-1' is not a rank: expected ranks like 0,2 or 0-3"),
        ("--ranks 1-0", "'1-0' is not a rank"),
    ):
        said = notebook.run(f"%%recshard {option}\nrank")
        assert words in said.stderr + said.error
        assert said.stdout == ""


def test_ranks_keep_their_variables_and_the_notebook_keeps_its_own(notebook: Notebook) -> None:
    notebook.ok("rank = 'mine'; x = 'mine too'; before = set(globals())")
    notebook.ok("%%recshard\nx = rank + 1")
    assert notebook.ok("%%recshard\nx").stdout == "[0] 1\n[1] 2\n"
    assert notebook.ok("print(rank, x)").stdout == "mine mine too\n"
    new = notebook.ok("print([n for n in set(globals()) - before if not n.startswith('_') and n != 'before'])")
    assert new.stdout == "[]\n"


def test_an_error_names_the_cell_by_the_number_at_its_prompt(notebook: Notebook) -> None:
    number = notebook.client.execute_interactive("%%recshard\n1 / 0", allow_stdin=False, output_hook=lambda _: None)
    prompt = number["content"]["execution_count"]
    said = notebook.run("%%recshard\n1 / 0")
    assert f'File "<cell [{prompt + 1}]>", line 1' in said.error


def test_what_ranks_display_alike_is_shown_once(notebook: Notebook) -> None:
    notebook.ok("%%recshard\nfrom IPython.display import HTML")
    said = notebook.ok("%%recshard\ndisplay(HTML('<i>both</i>'))\nprint('after')")
    assert [data["text/html"] for data in said.data] == ["<i>both</i>"]
    assert said.stdout == "[all]\n[all] after\n"


def test_one_traceback_when_ranks_agree_and_it_shows_the_cells_line(notebook: Notebook) -> None:
    said = notebook.run("%%recshard\na = 1\nb = a / 0")
    assert said.name == "RankError"
    assert said.error.count("ZeroDivisionError: division by zero\n") == 1
    assert "b = a / 0" in said.error
    assert "all 2 ranks" in said.error
    assert "launcher" not in said.error


def test_a_rank_that_raises_while_the_other_waits_for_it_is_named_within_seconds(notebook: Notebook) -> None:
    notebook.ok("%%recshard\nkept = rank")
    said = notebook.run("%%recshard\nif rank == 1: raise ValueError('boom')\ndist.barrier()")
    assert "rank 1 raised ValueError: boom" in said.error
    assert "rank 0 was waiting in a collective and was freed" in said.error
    assert notebook.ok("%%recshard\nt = torch.ones(1); dist.all_reduce(t); t.item(), kept").stdout == (
        "[0] (2.0, 0)\n[1] (2.0, 1)\n"
    )


def test_a_killed_rank_fails_the_cell_at_once_and_cells_are_refused_until_restart(notebook: Notebook) -> None:
    said = notebook.run(
        "%%recshard\nimport os, signal\nif rank == 1: os.kill(os.getpid(), signal.SIGKILL)\ndist.barrier()"
    )
    assert "rank 1 was killed by SIGKILL" in said.error
    refused = notebook.run("%%recshard\n1")
    assert refused.name == "LaunchError"
    assert "%recshard_restart" in refused.error
    notebook.ok("%recshard_restart")
    assert notebook.ok("%%recshard\nworld_size").stdout == "[all] 2\n"


def test_interrupt_frees_ranks_stuck_in_a_collective_and_variables_stay(notebook: Notebook) -> None:
    number = notebook.send(
        "%%recshard\nimport time\nkept = rank\nprint('go')\nif rank == 0: dist.barrier()\nelse: time.sleep(100)"
    )
    notebook.hear(number, until="go")
    notebook.manager.interrupt_kernel()
    said = notebook.hear(number)
    assert said.name == "RanksInterrupted"
    assert notebook.ok("%%recshard\nt = torch.ones(1); dist.all_reduce(t); t.item(), kept").stdout == (
        "[0] (2.0, 0)\n[1] (2.0, 1)\n"
    )


@pytest.mark.gate
def test_a_stalled_cell_shows_who_is_missing_where_and_stopping_it_does_not_say_it_twice(notebook: Notebook) -> None:
    notebook.ok("def late():\n    import time\n    time.sleep(100)")
    notebook.ok("%recshard_push late")
    number = notebook.send(
        "%%recshard\nt = torch.ones(3)\nprint('go')\nif rank == 0:\n    dist.all_reduce(t)\nelse:\n    late()"
    )
    notebook.hear(number, until="go")
    shown = notebook.hear(number, until_display="never entered")
    notebook.manager.interrupt_kernel()
    after = notebook.hear(number)
    text, page = (shown.data[-1][mime] for mime in ("text/plain", "text/html"))
    assert re.search(r"rank 1 never entered all_reduce #2, float32\[3\]; it is at cell \[\d+\] line 3: time", text)
    assert re.search(r"rank 0: waits in all_reduce #2, float32\[3\] at cell \[\d+\] line 4", text)
    assert "<table" in page
    assert not [data for data in after.data if "never entered" in data["text/plain"]]
    assert after.name == "RanksInterrupted"
    assert notebook.ok("%%recshard\ndist.all_reduce(t); 'fine'").stdout == "[all] 'fine'\n"


def test_collectives_that_do_not_pair_up_are_told_after_the_cell(notebook: Notebook) -> None:
    said = notebook.ok("%%recshard\nif rank == 0: dist.all_reduce(torch.ones(3), async_op=True)")
    assert "rank 1 never entered all_reduce #2, float32[3]; it has finished the cell" in said.data[0]["text/plain"]


@pytest.mark.parametrize("where", ["notebook", "ranks"])
def test_modules_edited_on_disk_are_loaded_again_on_the_ranks(notebook: Notebook, tmp_path: Path, where: str) -> None:
    module = tmp_path / f"edited_{where}.py"
    module.write_text("def answer(): return 1\n")
    notebook.ok(f"%%recshard\nimport sys; sys.path.insert(0, {str(tmp_path)!r})")
    if where == "notebook":
        notebook.ok("%load_ext autoreload\n%autoreload 2")
        start = "%%recshard\n"
    else:
        start = "%%recshard\n%load_ext autoreload\n%autoreload 2\n"
    notebook.ok(f"{start}import edited_{where}\nfrom edited_{where} import answer")
    assert notebook.ok("%%recshard\nanswer()").stdout == "[all] 1\n"
    module.write_text("def answer(): return 1 + 1  # edited\n")
    assert notebook.ok(f"%%recshard\nanswer(), edited_{where}.answer()").stdout == "[all] (2, 2)\n"
    module.write_text("def answer(: return\n")
    broken = notebook.ok("%%recshard\nanswer()")
    assert broken.stdout == "[all] 2\n"
    assert f"autoreload of edited_{where} failed: SyntaxError" in broken.stderr
    notebook.ok("%autoreload 0" if where == "notebook" else "%%recshard\n%autoreload 0")
    module.write_text("def answer(): return 'a third one'\n")
    assert notebook.ok("%%recshard\nanswer()").stdout == "[all] 2\n"
    notebook.ok("from recshard_lab.lab import magics; magics._autoreload.setting = None")


def test_names_on_the_ranks_are_completed_and_the_notebooks_stay_its_own(notebook: Notebook) -> None:
    notebook.ok("only_here = 1; shared_name = 'mine'; before = set(globals())")
    notebook.ok("%%recshard\nonly_there = torch.nn.Linear(2, 3); shared_name = 'ours'")
    assert notebook.complete("%%recshard\nonly_") == ["only_there"]
    assert "only_there.in_features" in notebook.complete("%%recshard\nx = only_there.in_")
    assert notebook.complete("only_") == ["only_here"]
    assert notebook.complete("%%recshard\ndist.all_to_all_s") == ["dist.all_to_all_single"]
    new = notebook.ok("print([n for n in set(globals()) - before if not n.startswith('_') and n != 'before'])")
    assert new.stdout == "[]\n"
    assert notebook.ok("print(shared_name)").stdout == "mine\n"


def test_a_time_limit_stops_a_cell(notebook: Notebook) -> None:
    said = notebook.run("%%recshard --timeout 0.5\nimport time; time.sleep(60)")
    assert "time limit of 0.5 s" in said.error


def test_variables_are_pushed_and_pulled(notebook: Notebook) -> None:
    notebook.ok("import torch\nnumbers = torch.arange(3)")
    notebook.ok("%recshard_push numbers")
    notebook.ok("%%recshard\nscaled = numbers * (rank + 1)")
    notebook.ok("back = %recshard_pull scaled --rank 1")
    assert notebook.ok("print(back.tolist())").stdout == "[0, 2, 4]\n"
    assert "no variable 'nothing'" in notebook.run("%recshard_push nothing").stderr
    assert "Fix: ranks.eval('scaled.sum()')" in notebook.run("%recshard_pull scaled.sum()").stderr


def test_launching_binds_ranks_and_keeps_a_variable_of_the_reader(notebook: Notebook) -> None:
    notebook.ok("del ranks")
    notebook.ok("%recshard_launch -n 2")
    assert notebook.ok("print(ranks.eval('rank + 1'))").stdout == "[1, 2]\n"
    notebook.ok("ranks = [3, 1, 2]")
    assert "'ranks' is a list of this notebook and was kept" in notebook.ok("%recshard_launch -n 2").stdout
    assert notebook.ok("print(ranks)").stdout == "[3, 1, 2]\n"
    notebook.ok("import recshard_lab as rs\nranks = old = rs.launcher.current()")
    notebook.ok("%recshard_stop")
    notebook.ok("%recshard_launch -n 2")
    assert notebook.ok("print(ranks is rs.launcher.current(), ranks is old)").stdout == "True False\n"


def test_launching_and_stopping_twice_are_told_clearly(notebook: Notebook) -> None:
    assert "running already" in notebook.ok("%recshard_launch -n 2").stdout
    other = notebook.run("%recshard_launch -n 3")
    assert other.name == "LaunchError"
    assert "%recshard_stop" in other.error
    assert "stopped" in notebook.ok("%recshard_stop").stdout
    assert "nothing to stop" in notebook.ok("%recshard_stop").stdout
    assert "%recshard_launch" in notebook.run("%%recshard\n1").error
    notebook.ok("%recshard_launch -n 2")


def test_a_cell_that_asks_for_input_is_told_that_ranks_have_no_keyboard(notebook: Notebook) -> None:
    error = notebook.run("%%recshard\nname = input('who? ')").error
    assert "EOFError: ranks have no keyboard. Fix: ask in a notebook cell, then %recshard_push the answer" in error


def test_magics_without_arguments_refuse_them(notebook: Notebook) -> None:
    for magic in ("status", "stop", "restart"):
        error = notebook.run(f"%recshard_{magic} --foo").stderr
        assert f"%recshard_{magic} takes no arguments, got '--foo'. Fix: %recshard_{magic}" in error
    assert "Fix: %recshard_launch -n 4" in notebook.run("%recshard_launch").stderr
    total, *lines = notebook.ok("%recshard_status").stdout.splitlines()
    assert "2 ranks" in total
    assert [line[:3] for line in lines] == ["[0]", "[1]"]
    assert all("idle" in line for line in lines)


def test_notebook_commands_inside_a_rank_cell_are_refused_by_line(notebook: Notebook) -> None:
    said = notebook.run("%%recshard\na = 1\n%time a")
    assert "line 2" in said.stderr + said.error


@pytest.mark.gate
def test_no_rank_outlives_a_kernel_killed_with_9() -> None:
    notebook = Notebook()
    try:
        notebook.ok("%load_ext recshard_lab\n%recshard_launch -n 2")
        pid = notebook.manager.provisioner.pid  # type: ignore[union-attr]
        ranks = family(pid)
        assert len(ranks) >= 3
        number = notebook.send("%%recshard\nprint('go')\nif rank: dist.barrier()\nelse: import time; time.sleep(99)")
        notebook.hear(number, until="go")
        os.kill(pid, signal.SIGKILL)
        assert gone(ranks, within=10)
    finally:
        notebook.close()


def test_a_restarted_kernel_leaves_no_rank() -> None:
    notebook = Notebook()
    try:
        notebook.ok("%load_ext recshard_lab\n%recshard_launch -n 2")
        ranks = family(notebook.manager.provisioner.pid)  # type: ignore[union-attr]
        notebook.manager.restart_kernel(now=False)
        assert gone(ranks, within=10)
    finally:
        notebook.close()


def test_a_kernel_loads_and_launches_after_each_was_stopped_in_an_import() -> None:
    notebook = Notebook()
    try:
        notebook.ok(INTERRUPTS)
        for module, line, shown in (
            ("recshard_lab.lab.magics.output", "%load_ext recshard_lab", ""),
            ("torch.distributed", "%recshard_launch -n 2", "2 ranks over gloo ready in"),
        ):
            stopped = notebook.run(f"AtImport({module!r});\n{line}")
            assert stopped.name == "KeyboardInterrupt", stopped.error
            assert notebook.ok(line).stdout.startswith(shown)
        assert notebook.ok("%%recshard\nt = torch.ones(1); dist.all_reduce(t); t.item()").stdout == "[all] 2.0\n"
    finally:
        notebook.close()
