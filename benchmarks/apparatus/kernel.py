"""A real ipykernel, driven as Jupyter drives it: messages in, messages out, real signals.

Messages travel over sockets in a private folder. Therefore the kernel can run in a private network, where a peer that
listens on every interface cannot be reached from outside.
"""

from __future__ import annotations

import json
import os
import queue
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from jupyter_client.blocking.client import BlockingKernelClient
from jupyter_client.kernelspec import KernelSpecManager
from jupyter_client.manager import KernelManager

__all__ = ["Kernel", "Reply", "own_network", "pss_mb"]

# Brings up the loopback interface of the new network, then becomes a kernel.
_BOOT = """
import fcntl, runpy, socket, struct
if {own_network}:
    with socket.socket() as s:
        fcntl.ioctl(s, 0x8914, struct.pack("16sH14x", b"lo", 0x1))  # SIOCSIFFLAGS, IFF_UP
runpy.run_module("ipykernel_launcher", run_name="__main__")
"""


@dataclass(frozen=True)
class Reply:
    """Output of a cell. seconds: from sending it until the prompt is free again."""

    seconds: float
    text: str
    error: str

    def checked(self) -> Reply:
        """Itself, or RuntimeError when the cell raised."""
        if self.error:
            raise RuntimeError(f"a cell that must work failed:\n{self.error}")
        return self


class Kernel:
    """A kernel on some Python, in a private folder; a context manager that leaves no process behind."""

    def __init__(self, python: str = sys.executable, *, isolated: bool = False) -> None:
        self.folder = tempfile.mkdtemp(prefix="rsb-")  # short: the path of a socket has at most 107 letters
        prefix = _unshare() if isolated else []
        argv = [*prefix, python, "-c", _BOOT.format(own_network=isolated), "-f", "{connection_file}"]
        spec = {"argv": argv, "display_name": "bench", "language": "python"}
        place = Path(self.folder, "bench")
        place.mkdir()
        (place / "kernel.json").write_text(json.dumps(spec))
        self.manager = KernelManager(
            kernel_name="bench",
            kernel_spec_manager=KernelSpecManager(kernel_dirs=[self.folder]),
            transport="ipc",
            connection_file=f"{self.folder}/k.json",
        )
        self._log = Path(self.folder, "log")
        with self._log.open("wb") as log:
            self.manager.start_kernel(env=_environment(python, self.folder), stdout=log, stderr=log)
        self.process = psutil.Process(self.manager.provisioner.pid)  # type: ignore[union-attr]
        self.client: BlockingKernelClient = self.manager.client()
        self.client.start_channels()

    def __enter__(self) -> Kernel:
        try:
            self.client.wait_for_ready(timeout=120)
        except BaseException as error:
            last = self._log.read_text(errors="replace")[-2000:]
            self.close()
            if isinstance(error, RuntimeError):
                raise RuntimeError(f"the kernel did not start: {error}\n{last}") from None
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the kernel and, one by one, what it started and left running."""
        started = self.family()
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=True)
        self.manager.cleanup_resources()
        _, left = psutil.wait_procs(started, timeout=0.5)
        for process in left:  # psutil makes sure that the number is still the same process
            with suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(left, timeout=5)
        shutil.rmtree(self.folder, ignore_errors=True)

    def run(self, source: str, timeout: float = 120) -> Reply:
        """A cell there and back."""
        return self.hear(self.send(source), timeout)

    def ok(self, source: str, timeout: float = 120) -> Reply:
        """A cell that must not raise."""
        return self.run(source, timeout).checked()

    def send(self, source: str) -> str:
        """Sends a cell and does not wait."""
        return self.client.execute(source)

    def hear(self, cell: str, timeout: float = 120, *, until: Callable[[Reply], bool] | None = None) -> Reply:
        """What the cell sends back, until its prompt is free or `until` holds of what came so far."""
        begun, text, error = time.perf_counter(), "", ""
        for kind, content in self._messages(cell, timeout):
            if kind == "stream":
                text += content["text"]
            elif kind == "error":
                error = "\n".join(content["traceback"])
            reply = Reply(time.perf_counter() - begun, text, error)
            if kind == "status" and content["execution_state"] == "idle":
                return reply
            if until is not None and until(reply):
                return reply
        raise AssertionError("the messages of a cell end with idle")

    def interrupt(self) -> None:
        """The stop button of the notebook."""
        self.manager.interrupt_kernel()

    def family(self) -> list[psutil.Process]:
        """Every process that the kernel started, and theirs."""
        try:
            return list(self.process.children(recursive=True))
        except psutil.NoSuchProcess:
            return []

    def _messages(self, cell: str, timeout: float) -> Iterator[tuple[str, dict[str, Any]]]:
        deadline = time.monotonic() + timeout
        while True:
            try:
                message = self.client.get_iopub_msg(timeout=max(deadline - time.monotonic(), 0.001))
            except queue.Empty:
                raise TimeoutError(f"a cell did not finish in {timeout:g} s") from None
            if message["parent_header"].get("msg_id") == cell:
                yield message["msg_type"], message["content"]


def own_network() -> str:
    """Why a process cannot get a private network on this machine; empty if it can."""
    if not sys.platform.startswith("linux") or shutil.which("unshare") is None:
        return "needs Linux and unshare (util-linux)"
    done = subprocess.run([*_unshare(), sys.executable, "-c", ""], capture_output=True, text=True, check=False)
    return done.stderr.strip()


def pss_mb(processes: list[psutil.Process]) -> float:
    """Memory of processes in all, in MB: a page shared by k of them, or with others, counts as 1/k."""
    return sum(process.memory_full_info().pss for process in processes) / 1e6


def _unshare() -> list[str]:
    return [shutil.which("unshare") or "unshare", "--user", "--map-root-user", "--net"]


def _environment(python: str, folder: str) -> Mapping[str, str]:
    """The same for every launcher. The path contains only Python's programs, because one peer kills with pkill."""
    ours = ("PYTHONPATH",) if python == sys.executable else ()
    kept = {name: os.environ[name] for name in ("LD_LIBRARY_PATH", "LANG", *ours) if name in os.environ}
    return {
        **kept,
        "PATH": os.path.dirname(python),
        "HOME": folder,
        "TMPDIR": folder,
        "IPYTHONDIR": f"{folder}/ipython",
        "JUPYTER_RUNTIME_DIR": folder,
        "GLOO_SOCKET_IFNAME": "lo" if sys.platform.startswith("linux") else "lo0",
        "OMP_WAIT_POLICY": "PASSIVE",
        "OMP_NUM_THREADS": "1",
    }
