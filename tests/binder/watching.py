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
    would let go of: the peak is an upper bound of what the limit would see, up to the time between two samples.
    """

    def __init__(self, pid: int) -> None:
        self.peak = self.samples = 0
        self._known: dict[int, psutil.Process] = {pid: psutil.Process(pid)}  # kept: an orphan leaves the tree, not us
        self._left = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._left.set()
        self._thread.join()

    def processes(self) -> list[psutil.Process]:
        """All that are or were in the tree."""
        for process in list(self._known.values()):
            with suppress(psutil.NoSuchProcess):
                self._known |= {child.pid: child for child in process.children(recursive=True)}
        return list(self._known.values())

    def _watch(self) -> None:
        while not self._left.wait(0.05):
            self.peak = max(self.peak, sum(proportional_bytes(process.pid) for process in self.processes()))
            self.samples += 1
