"""Records TorchRec's results: ``python -m tests.compat.parity.record [FILE...]``, from the repository's root.

``RECSHARD_PEERS`` names the interpreter of an environment with TorchRec; without it one is made.
"""

import json
import sys
from contextlib import closing

from benchmarks.apparatus.environments import TorchRecEnv
from tests.compat.parity.compare import CASES, RECORDED, Observer


def main(files: list[str]) -> None:
    """The command.

    Raises:
        SystemExit: a case failed under TorchRec.
    """
    with TorchRecEnv() as env, closing(Observer(env.python, "torchrec")) as observer:
        found = {file: observer.results(file) for file in files or [path.stem for path in CASES]}
    failed = []
    for file, cases in found.items():
        failed += [f"{file}.{name}:\n{result['error']}" for name, result in cases.items() if "error" in result]
        kept = {name: result["value"] for name, result in cases.items() if "value" in result}
        lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(value)}" for name, value in kept.items())
        (RECORDED / f"{file}.json").write_text(f"{{\n{lines}\n}}\n")
    if failed:
        raise SystemExit("\n".join([*failed, f"{len(failed)} cases failed under TorchRec"]))


if __name__ == "__main__":
    main(sys.argv[1:])
