"""Runs the cases of files under one library: ``python -m tests.compat.parity.observe LIBRARY``.

Reads the name of a file per line, and prints one line for it: ``OBSERVED {case: {"value": ...} or {"error": ...}}``.
Each file runs in a fork, so that imports are done once, and no file changes the state of another.
"""

import json
import os
import signal
import sys
import traceback
import warnings
from importlib import import_module
from importlib.util import find_spec
from typing import Any

PRELOADED = (
    "torch._dynamo",
    "torch.export",
    "llvmlite.binding",
    "fbgemm_gpu.split_table_batched_embeddings_ops_training",
    "numpy.ma",
    "torch.profiler",
)
"""What cases import beside the served names: ranks do not import it again."""
LIMIT_S = 600


def main(library: str) -> None:
    """The command."""
    warnings.simplefilter("ignore")
    rooms: set[str] = set()
    if library == "recshard_lab":
        from recshard_lab.compat import install
        from recshard_lab.compat.served import served_modules

        install(shadow=True)
        rooms = {target.partition(":")[0] for names in served_modules().values() for target in names.values()}
    import torch

    torch.set_num_threads(1)
    import_module("torchrec")
    for module in (*PRELOADED, *sorted(rooms)):
        if find_spec(module.partition(".")[0]) is not None:
            import_module(module)
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            signal.alarm(LIMIT_S)
            print("\nOBSERVED " + json.dumps(_results(line.strip())), flush=True)
            os._exit(0)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if status:
            error = f"its process ended with {status}"
            print("\nOBSERVED " + json.dumps({"process": {"error": error}}), flush=True)


def _results(file: str) -> dict[str, Any]:
    from tests.compat.parity.case import Case, observed

    try:
        module = import_module(f"tests.compat.parity.cases.{file}")
    except ImportError as error:
        return {"import": {"error": f"{error}"}}
    found: dict[str, Any] = {}
    for name, one in list(vars(module).items()):  # a warning adds a name
        if isinstance(one, Case):
            try:
                found[name] = {"value": observed(one), "names": one.names, "differs": one.differs}
            except Exception:
                found[name] = {"error": traceback.format_exc(limit=-6)}
    return found


if __name__ == "__main__":
    main(sys.argv[1])
