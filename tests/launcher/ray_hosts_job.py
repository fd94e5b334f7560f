"""A notebook on a Ray cluster of two hosts: ``python -m tests.launcher.ray_hosts_job ADDRESS FOLDER STEPS``."""

from __future__ import annotations

import sys
from pathlib import Path
from time import time

from recshard_lab.launcher import RankError, launch
from tests.launcher.hosts_job import main

if __name__ == "__main__":
    with launch(2, nodes=2, engine="ray", address=sys.argv[1]) as ranks:
        print(ranks, flush=True)
        try:
            ranks.run(main, Path(sys.argv[2]), int(sys.argv[3]), [])
        except RankError as error:
            print(f"{time()} {error}", flush=True)
