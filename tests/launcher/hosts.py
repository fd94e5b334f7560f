"""Two hosts on one machine: network namespaces with their own addresses, names and ``/etc/hosts``, joined by a link.

The namespaces have no names. Each exists as long as a process runs in it, so nothing is left even after ``kill -9``
of the tests. Without root they are made inside a user namespace.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from tests.patience import scaled, wait_until

ROOT = Path(__file__).parents[2]
_ENTER = ("--net", "--uts", "--mount")
needs_hosts = pytest.mark.needs("unshare", "nsenter", "ip", "mount", "hostname", "network namespaces")


class Host:
    """One host. `name` resolves to a loopback address on the host itself, as Debian's installer sets it up.

    Args:
        number: 0 or 1. The address is ``10.77.0.<number + 1>``.
        folder: for its ``/etc/hosts``.
        first: the host whose user namespace this one shares.
    """

    def __init__(self, number: int, folder: Path, first: Host | None) -> None:
        self.name, self.address, self.device = f"host{number}", f"10.77.0.{number + 1}", f"link{number}"
        into = () if first is None else first._user_namespace()
        mapped = ("--user", "--map-root-user") if os.getuid() and first is None else ()
        command = [*into, "unshare", *mapped, *_ENTER, "sh", "-c", "echo up; exec cat"]
        self.holder = subprocess.Popen(  # ends with this process: its input closes
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        assert self.holder.stdout is not None
        if self.holder.stdout.readline() != "up\n":
            raise OSError(f"unshare: {self.holder.communicate()[1].strip()}")
        self._started: list[subprocess.Popen[bytes]] = []
        self._namespace = os.readlink(f"/proc/{self.holder.pid}/ns/net")
        file = folder / f"{self.name}.hosts"
        others = [f"10.77.0.{other + 1} host{other}" for other in range(2) if other != number]
        file.write_text("\n".join(["127.0.0.1 localhost", f"127.0.1.1 {self.name}", *others, ""]))
        try:
            self.run("mount", "--bind", str(file), "/etc/hosts")
            self.run("hostname", self.name)
            self.run("ip", "link", "set", "lo", "up")
        except OSError:
            self.close()
            raise

    def _user_namespace(self) -> tuple[str, ...]:
        if not os.getuid():
            return ()
        return "nsenter", "--target", str(self.holder.pid), "--user", "--preserve-credentials"

    def command(self, *command: str) -> list[str]:
        """A command line that runs `command` on this host, in this process's working directory."""
        enter = self._user_namespace() or ("nsenter", "--target", str(self.holder.pid))
        return [*enter, *_ENTER, "--", "sh", "-c", 'cd "$0" && exec "$@"', os.getcwd(), *command]

    def run(self, *command: str) -> str:
        """Runs a command to its end; its output."""
        done = subprocess.run(self.command(*command), capture_output=True, text=True, timeout=60, check=False)
        if done.returncode:
            raise OSError(f"{' '.join(command)} on {self.name}: {done.stderr.strip()}")
        return done.stdout

    def start(self, *command: str, log: Path, **variables: str) -> subprocess.Popen[bytes]:
        """Starts a command in its own session; its output goes to the end of `log`."""
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **variables}
        for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            if name not in variables:
                environment.pop(name, None)
        with log.open("ab") as out:
            process = subprocess.Popen(
                self.command(*command), env=environment, stdout=out, stderr=out, start_new_session=True
            )
        self._started.append(process)
        return process

    def pids(self) -> list[int]:
        """Every process on this host."""
        found = []
        for pid in (int(name) for name in os.listdir("/proc") if name.isdigit()):
            with suppress(OSError):  # ended meanwhile, or of another user
                if os.readlink(f"/proc/{pid}/ns/net") == self._namespace and pid != self.holder.pid:
                    found.append(pid)
        return found

    def kill(self) -> None:
        """SIGKILL to every process on this host."""

        def none_is_left() -> bool:
            pids = self.pids()
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            return not pids

        wait_until(none_is_left)

    def close(self) -> None:
        """Ends the host with all its processes."""
        self.kill()
        for process in self._started:
            process.wait(scaled(10))
        self.holder.kill()
        self.holder.communicate()


class TwoHosts:
    """Two hosts and the link between them.

    Args:
        folder: for the hosts' files.
    """

    def __init__(self, folder: Path) -> None:
        self.hosts: list[Host] = []
        try:
            self.hosts.append(Host(0, folder, None))
            self.hosts.append(Host(1, folder, self.hosts[0]))
            here, there = self.hosts
            peer = ("peer", "name", there.device, "netns", str(there.holder.pid))
            here.run("ip", "link", "add", here.device, "type", "veth", *peer)
            for host in self.hosts:
                host.run("ip", "address", "add", f"{host.address}/24", "dev", host.device)
                host.run("ip", "link", "set", host.device, "up")
        except BaseException:
            self.close()
            raise

    def __getitem__(self, number: int) -> Host:
        return self.hosts[number]

    def __iter__(self) -> Iterator[Host]:
        return iter(self.hosts)

    def unplug(self) -> None:
        """Packets between the hosts are lost from now on, without a word to either side."""
        self.hosts[0].run("ip", "link", "set", self.hosts[0].device, "down")

    def plug(self) -> None:
        """Packets pass again."""
        self.hosts[0].run("ip", "link", "set", self.hosts[0].device, "up")

    def torchrun(
        self, *command: str, log: Path, ranks: int = 1, rdzv: str = "host0:29500", **variables: str
    ) -> list[subprocess.Popen[bytes]]:
        """An agent of torchrun on each host, with `ranks` ranks each. They meet at host 0."""
        options = ["--nnodes=2", f"--nproc-per-node={ranks}", "--rdzv-backend=c10d", f"--rdzv-endpoint={rdzv}"]
        run = [sys.executable, "-m", "torch.distributed.run", *options, "--rdzv-id=hosts", *command]
        return [host.start(*run, log=log.with_name(f"{log.name}.{host.name}"), **variables) for host in self.hosts]

    def close(self) -> None:
        """Ends both hosts with all their processes."""
        for host in self.hosts:
            host.close()


def possible() -> bool:
    """Whether this machine can make such hosts. Tries it."""
    try:
        with two_hosts():
            return True
    except OSError:
        return False


@contextmanager
def two_hosts() -> Iterator[TwoHosts]:
    """Two hosts until the end of the block."""
    folder = Path(tempfile.mkdtemp(prefix="rs-hosts-"))
    try:
        hosts = TwoHosts(folder)
        try:
            yield hosts
        finally:
            hosts.close()
    finally:
        shutil.rmtree(folder)


def ended(processes: list[subprocess.Popen[Any]], within: float) -> list[int]:
    """Exit codes of processes that end in time, scaled to this machine."""
    wait_until(lambda: all(process.poll() is not None for process in processes), within)
    return [process.wait() for process in processes]
