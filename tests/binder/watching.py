"""How much memory a process and all that it started take together, sampled while they run."""

from __future__ import annotations

import threading
from contextlib import suppress
from types import TracebackType

import psutil


def proportional_bytes(pid: int) -> int:
    """Resident bytes of a process, a page that n processes share counted as 1/n (PSS); 0 once it is gone."""
    try:
        with open(f"/proc/{pid}/smaps_rollup") as told:
            return next((int(line.split()[1]) * 1024 for line in told if line.startswith("Pss:")), 0)
    except OSError:
        return 0


class Watch:
    """Samples the tree below ``pid`` until it is left; ``peak`` is the most that was ever there at once.

    A page is counted as long as any process of the tree maps it, files of libraries too, which a container's limit
    would let go of: what is printed is an upper bound of what the limit would see, up to the time between two samples.
    """

    def __init__(self, pid: int, every_s: float = 0.05) -> None:
        self.peak = 0
        self.most: dict[int, int] = {}  # what took it: pid -> bytes
        self.commands: dict[int, str] = {}
        self.samples = 0
        self._known: dict[int, psutil.Process] = {pid: psutil.Process(pid)}  # kept: an orphan leaves the tree, not us
        self._every_s, self._left = every_s, threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._left.set()
        self._thread.join()

    def processes(self) -> list[psutil.Process]:
        """All that are or were in the tree and still run."""
        for process in list(self._known.values()):
            try:
                self._known |= {child.pid: child for child in process.children(recursive=True)}
            except psutil.NoSuchProcess:
                self._known.pop(process.pid, None)  # two threads come by
        return list(self._known.values())

    def __str__(self) -> str:
        """The peak, and the five programs that took most of it; ranks bear the name of what they were forked from."""
        by_program: dict[str, list[int]] = {}
        for pid, taken in self.most.items():
            by_program.setdefault(self.commands[pid], []).append(taken)
        largest = sorted(by_program.items(), key=lambda item: -sum(item[1]))[:5]
        parts = [f"{sum(each) / 2**20:.0f} in {len(each)} x ...{name[-30:]!r}" for name, each in largest]
        return f"at most {self.peak / 2**20:.0f} MiB ({self.samples} samples): {', '.join(parts)}"

    def _watch(self) -> None:
        while not self._left.is_set():
            taken: dict[int, int] = {}
            for process in self.processes():
                with suppress(psutil.Error):
                    self.commands[process.pid] = " ".join(process.cmdline()) or self.commands.get(process.pid, "")
                    taken[process.pid] = proportional_bytes(process.pid)
            self.samples += 1
            if sum(taken.values()) > self.peak:
                self.peak, self.most = sum(taken.values()), taken
            self._left.wait(self._every_s)
