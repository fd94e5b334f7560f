"""How one process starts another that serves: options and file descriptors, by an environment variable."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import IO

from recshard_lab.serving.server.config import TOKEN_VARIABLE, ServerConfig

VARIABLE = "RECSHARD_SERVE"


@dataclass(frozen=True)
class Inherited:
    """What a started process inherits.

    Args:
        config: options.
        sock: file descriptor of the listening socket.
        lifeline: file descriptor of a pipe that the starting process holds open. At its end the server drains.
        in_group: whether this is a worker of a supervisor.
    """

    config: ServerConfig
    sock: int
    lifeline: int
    in_group: bool = False

    def start(
        self, token: str | None = None, stderr: IO[bytes] | None = None, environment: Mapping[str, str] | None = None
    ) -> subprocess.Popen[bytes]:
        """Starts the process.

        Args:
            token: bearer token. Default: that of the options or of this process's environment.
            stderr: the log. Default: that of this process.
            environment: further variables.
        """
        options = {"config": self.config.as_json(), "in_group": self.in_group}
        variables = {
            **os.environ,
            **(environment or {}),
            VARIABLE: json.dumps(options | {"fds": [self.sock, self.lifeline]}),
        }
        if token is not None:
            variables[TOKEN_VARIABLE] = token
        return subprocess.Popen(
            [sys.executable, "-m", "recshard_lab.serving.server.process"],
            env=variables,
            pass_fds=(self.sock, self.lifeline),
            stdin=subprocess.DEVNULL,
            stderr=stderr,
            start_new_session=True,  # Ctrl+C in a terminal or notebook reaches the starting process only
        )

    @staticmethod
    def from_environment() -> Inherited:
        """What the starting process passed. Removes the variable."""
        options = json.loads(os.environ.pop(VARIABLE))
        sock, lifeline = options["fds"]
        return Inherited(ServerConfig.from_json(options["config"]), sock, lifeline, options["in_group"])


def start_with_lifeline(
    config: ServerConfig,
    sock: socket.socket,
    *,
    in_group: bool,
    token: str | None = None,
    stderr: IO[bytes] | None = None,
    environment: Mapping[str, str] | None = None,
) -> tuple[subprocess.Popen[bytes], int]:
    """Starts a server process. Returns it and the end of the lifeline that keeps it alive."""
    theirs, ours = os.pipe()
    try:
        process = Inherited(config, sock.fileno(), theirs, in_group).start(token, stderr, environment)
    except BaseException:
        os.close(ours)
        raise
    finally:
        os.close(theirs)
    return process, ours
