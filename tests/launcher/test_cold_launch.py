"""A stop at any moment of a process's first launch ends it and leaves no rank, and the next launch works.

The signals are real. The process itself sends them at a moment of its work: the import of a module, or the call of a
function. No clock is involved.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.timeout(120)

INTERRUPTS = '''
import os, signal, sys
import recshard_lab as rs

signal.signal(signal.SIGINT, signal.default_int_handler)  # as in a kernel; a shell's background jobs ignore SIGINT

class AtImport:
    """Interrupts this process when the import of a module begins."""
    def __init__(self, module):
        self.module = module
        sys.meta_path.insert(0, self)
    def find_spec(self, name, path, target=None):
        if name == self.module:
            self.module = ""
            os.kill(os.getpid(), signal.SIGINT)

class AtCalls:
    """Interrupts this process at calls, in this order. Each is the end of a stack: callers, then the function."""
    def __init__(self, *stacks):
        self.stacks = [stack.split(" > ") for stack in stacks]
        sys.setprofile(self)
    def __call__(self, frame, event, argument):
        names, caller = [], frame
        while event == "call" and caller is not None and len(names) < len(self.stacks[0]):
            names.insert(0, caller.f_code.co_qualname)
            caller = caller.f_back
        if names == self.stacks[0]:
            del self.stacks[0]
            if not self.stacks:
                sys.setprofile(None)
            os.kill(os.getpid(), signal.SIGINT)

def interrupted(use, when, *moments):
    when(*moments)
    try:
        use()
    except KeyboardInterrupt:
        return
    sys.exit(f"no interrupt at {moments}")
'''

LAUNCHES = '''
import psutil
from recshard_lab.launcher import wires
from recshard_lab.launcher.engines import fork

def left():
    """The ranks, and forkservers but the present one: a rank is a fork of a forkserver, with its command line."""
    present = fork._current.process.pid
    everything = [process for process in psutil.Process().children(recursive=True) if process.pid != present]
    found = []
    for process in everything:
        try:
            found += [process.pid] if "forkserver.main" in " ".join(process.cmdline()) else []
        except psutil.NoSuchProcess:
            pass
    return found

interrupted(lambda: rs.launch(2), AtImport, "torch._tensor")
spec = wires.rank_spec
assert "torch" in sys.modules and fork._current is None  # the launch ended with the import
for moments in [
    ["Forkserver.__init__ > Channel.__init__"],  # its process runs
    ["Forkserver.folder > Event.wait > Condition.wait"],  # it imports torch
    ["Forkserver.fork > Forkserver._send > Channel.send"],  # half of a request is sent
    ["ForkedRank.pid > Forkserver.fork.<locals>.pid"],
    ["Flight.wait > Flight._take"],  # ranks are starting
    ["Flight.wait > Flight._take", "World.stop > Wires.stop"],
]:
    if moments[0].startswith("Flight"):
        wires.rank_spec = lambda shape, rank, store: spec(shape, rank, f"{store}-{rank}")  # they never meet
    interrupted(lambda: rs.launch(2), AtCalls, *moments)
    assert not left(), (moments, left())
    assert rs.launcher.current() is None
wires.rank_spec = spec
with rs.launch(2) as ranks:
    print(ranks.run(pow, 2, 5))
assert not left()
'''


def run(program: str) -> str:
    done = subprocess.run([sys.executable, "-c", INTERRUPTS + program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "does not answer" not in done.stdout + done.stderr  # a notice after 3 s
    return done.stdout


def test_a_launch_works_after_stops_at_all_moments_of_launches_before_it() -> None:
    assert run(LAUNCHES).splitlines()[-1] == "[32, 32]"


USES = {  # what is used, and a module of torch whose import is interrupted
    "a name of the library": ("rs.DLRM", "torch.distributed"),
    "a name of a room": ("rs.train.Recipe", "torch.nn"),
    "a topology of this machine": ("rs.Topology.preset('this')", "torch.cuda"),
    "join": ("rs.launcher.join().__enter__()", "torch.optim"),
}


@pytest.mark.gate
@pytest.mark.parametrize("case", USES)
def test_what_a_stop_ended_works_the_next_time(case: str) -> None:
    """Also without a launch: an interrupted import of torch is completed. torch 2.13 does not survive another one."""
    use, module = USES[case]
    run(f"interrupted(lambda: {use}, AtImport, {module!r})\n{use}\nimport torch\nprint(torch.ones(2))")
