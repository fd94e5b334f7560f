"""Runs a script for TorchRec on this library, or prints which of TorchRec's names are served.

``python -m recshard_lab.compat``                       names and differences
``python -m recshard_lab.compat SCRIPT [ARGUMENTS]``    runs a script; ``import torchrec`` is this library
``torchrun --nproc-per-node 2 -m recshard_lab.compat SCRIPT``    on two ranks

A script is a Python file, or a notebook (``.ipynb``).
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from recshard_lab.compat.coverage_table import report
from recshard_lab.compat.difference_list import differences
from recshard_lab.compat.script_run import run_script
from recshard_lab.compat.torchrec import install


def main(arguments: list[str]) -> None:
    """The command.

    Raises:
        SystemExit: a script that does not exist, or TorchRec is installed and ``--shadow`` is missing.
    """
    parser = argparse.ArgumentParser("python -m recshard_lab.compat", description="Runs a script for TorchRec.")
    parser.add_argument("--shadow", action="store_true", help="serve TorchRec's names although TorchRec is installed")
    parser.add_argument("--translate", action="store_true", help="replace NCCL by Gloo, and cuda by cpu, without GPUs")
    parser.add_argument("script", nargs="?", help="default: print the names that are served, and the differences")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="of the script")
    options = parser.parse_args(arguments)
    if options.script is None:
        print(report(), differences(), sep="\n\n")
        return
    script = Path(options.script)
    if not script.is_file():
        parser.error(f"{options.script} is not a file. Fix: pass the path of a Python script")
    try:
        install(shadow=options.shadow)
    except ImportError as error:
        parser.error(str(error).replace("call install(shadow=True)", "pass --shadow"))
    sys.argv = [str(script), *options.arguments]
    run_script(script, options.translate)


if __name__ == "__main__":
    main(sys.argv[1:])
