"""Few descriptors, a full disk, closed streams: an error that names the limit, and nothing left behind."""

from __future__ import annotations

import os
import re
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
import torch

from recshard_lab.launcher import LaunchError, RankError, current, launch
from recshard_lab.launcher.engines.fork import forkserver
from tests.launcher.waiting import left

pytestmark = pytest.mark.timeout(60)


@contextmanager
def descriptors(more: int) -> Iterator[None]:
    """This process may open so many descriptors more."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(int(fd) for fd in os.listdir("/proc/self/fd"))
    taken = [os.open(os.devnull, os.O_RDONLY) for _ in range(highest - len(os.listdir("/proc/self/fd")) + 2)]
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(highest, *taken, 0) + 1 + more, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        for fd in taken:
            os.close(fd)


def test_a_launch_with_few_descriptors_names_the_limit_and_leaves_nothing() -> None:
    with launch(2):  # starts the forkserver
        pass
    me, server = psutil.Process(), psutil.Process(forkserver().process.pid)
    before = me.num_fds()
    came_up = []
    for more in range(0, 16, 2):
        with descriptors(more):
            try:
                with launch(2) as ranks:
                    came_up.append(ranks.run(int))
            except LaunchError as error:
                assert not came_up, "fewer descriptors were enough"
                assert "uses all" in str(error)  # noqa: PT017
                assert "Fix: run `ulimit -n 4096`" in str(error)  # noqa: PT017
        assert current() is None
        assert me.num_fds() == before
        assert not left(server.children())
    assert came_up[0] == [0, 0]
    assert len(came_up) < 8


def test_large_values_with_few_descriptors_name_the_limit_and_leave_none_open() -> None:
    me = psutil.Process()
    large = torch.ones(1 << 19)
    with launch(2) as ranks:
        ranks.push({"large": large})
        before = me.num_fds()
        kept = [ranks.eval(f"torch.full((1 << 19,), {number}.0)")[0] for number in range(4)]
        assert me.num_fds() == before  # large values that are kept hold no descriptor
        assert [tensor[-1].item() for tensor in kept] == [0, 1, 2, 3]
        for more, use in ((0, lambda: ranks.pull("large")), (1, lambda: ranks.run(lambda: torch.ones(1 << 19)))):
            with descriptors(more), pytest.raises(LaunchError, match=r"uses all \d+ file desc.*Fix: run `ulimit"):
                use()
            assert ranks.run(int) == [0, 0]
            assert me.num_fds() == before
        with descriptors(0), pytest.raises(LaunchError, match=r"sending a value failed: .*uses all \d+ file desc"):
            ranks.push({"large": large})
        assert me.num_fds() == before
        ranks.exec("import os, resource\nused = len(os.listdir('/dev/fd')) - 1")
        ranks.exec("resource.setrlimit(resource.RLIMIT_NOFILE, (used, used))")
        for use in (lambda: ranks.pull("large"), lambda: ranks.push({"large": large})):
            with pytest.raises(RankError, match=r"all 2 ranks raised LaunchError: .*uses all \d+ file descriptors"):
                use()
        assert me.num_fds() == before


CLOSED = """
import os
from recshard_lab.launcher import launch
with launch(2) as ranks:
    os.write(3, repr(ranks.run(lambda: os.environ["RANK"])).encode())
"""


@pytest.mark.gate
def test_ranks_start_from_a_process_whose_streams_are_closed() -> None:
    read, write = os.pipe()
    command = f'exec 3>&{write}; exec "$0" -c "$1" <&- >&- 2>&-'
    done = subprocess.run(["bash", "-c", command, sys.executable, CLOSED], pass_fds=[write], check=False)
    os.close(write)
    with os.fdopen(read) as pipe:
        assert pipe.read() == "['0', '1']"
    assert done.returncode == 0


FULL = """
import os, subprocess, sys
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", sys.argv[1]], check=True)
os.environ["TMPDIR"] = sys.argv[1]
from recshard_lab.launcher import LaunchError, RankError, launch
from recshard_lab.launcher.engines.fork import forkserver
def fill():
    with open(f"{sys.argv[1]}/fill", "wb", buffering=0) as file:
        try:
            while True: file.write(bytes(1024))
        except OSError: pass
folder = forkserver().folder
ranks = launch(2)
ranks.exec("kept = rank")
fill()
print(ranks.pull("kept"))
try: ranks.exec("if rank: 1 / 0\\ndist.barrier()")
except RankError as error: print(str(error).splitlines()[-1])
ranks.stop()
fill()
try: launch(2)
except LaunchError as error: print(str(error).splitlines()[0])
os.unlink(f"{sys.argv[1]}/fill")
with launch(2) as ranks: print(ranks.run(int))
"""


@pytest.mark.needs("unshare", "mount", "the right to mount")
@pytest.mark.timeout(120)
def test_a_full_disk_is_named_with_its_folder_and_space_is_enough_to_go_on(tmp_path: Path) -> None:
    command = ["unshare", "--mount", sys.executable, "-c", FULL, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stderr
    cell, failed, refused, fresh = done.stdout.splitlines()
    full = rf"No space left on device in {tmp_path}/recshard-\S+, where ranks meet\. Fix: free space there"
    assert cell == "[0, 1]"
    assert re.search(rf"could not be rebuilt \(all 2 ranks raised LaunchError: {full}", failed)
    assert re.search(f"the ranks did not come up: all 2 ranks raised LaunchError: {full}", refused)
    assert fresh == "[0, 0]"
