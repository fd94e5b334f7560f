"""pip, run by the interpreter of another environment."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence

__all__ = ["pip_install"]


def pip_install(python: str, arguments: Sequence[str], timeout_s: float, folder: str) -> str:
    """Installs for `python`.

    Args:
        python: the interpreter.
        arguments: requirements and options.
        timeout_s: after which pip is ended, in seconds.
        folder: where pip unpacks; nothing of it is kept for a next time.

    Returns:
        Why it failed, in a line; empty when it did not.
    """
    command = [python, "-m", "pip", "install", "--quiet", "--no-cache-dir", *arguments]
    environment = {**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1", "TMPDIR": folder}
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=timeout_s, env=environment)
    except subprocess.TimeoutExpired:
        return f"pip was not through after {timeout_s:g} s"
    if done.returncode == 0:
        return ""
    errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or done.stderr.splitlines()
    return errors[-1].strip() if errors else f"pip ended with code {done.returncode}"
