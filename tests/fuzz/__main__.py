"""Repeats one case: ``python -m tests.fuzz WORLD_SIZE NUMBER``."""

import sys

import recshard_lab
from tests.fuzz.cases import draw
from tests.fuzz.compare import check

if __name__ == "__main__":
    world, number = int(sys.argv[1]), int(sys.argv[2])
    case = draw(world, number)
    print(case)
    with recshard_lab.launch(world, nodes=case.nodes) as ranks:
        check(case, ranks)
    print("equal within the bounds")
