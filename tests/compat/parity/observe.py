"""Runs the cases of one or more files under one library: ``python -m tests.compat.parity.observe LIBRARY FILE...``.

Prints one JSON object: {file: {case: {"value": ...} or {"error": ...}}}.
"""

import json
import sys
import traceback
import warnings
from importlib import import_module
from typing import Any


def main(library: str, files: list[str]) -> None:
    """The command."""
    warnings.simplefilter("ignore")
    if library == "recshard_lab":
        from recshard_lab.compat import install

        install(shadow=True)
    import torch

    from tests.compat.parity.case import Case, observed

    torch.set_num_threads(1)
    found: dict[str, dict[str, Any]] = {}
    for file in files:
        try:
            module = import_module(f"tests.compat.parity.cases.{file}")
        except ImportError as error:
            found[file] = {"import": {"error": f"{error}"}}
            continue
        cases = found[file] = {}
        for name, one in list(vars(module).items()):  # a warning adds a name
            if isinstance(one, Case):
                try:
                    cases[name] = {"value": observed(one), "names": one.names, "differs": one.differs}
                except Exception:
                    cases[name] = {"error": traceback.format_exc(limit=-6)}
    print("OBSERVED " + json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
