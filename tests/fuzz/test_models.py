"""Random models under random plans are the unsharded ones, within the bounds of rounding (`tests.fuzz`)."""

import os
import time
from collections.abc import Iterator
from itertools import count

import pytest

import recshard_lab
from tests.fuzz.cases import NODES, draw
from tests.fuzz.compare import Bounds, check, compare
from tests.fuzz.jobs import live

SECONDS = float(os.environ.get("RECSHARD_FUZZ", "0"))
FIRST = int(os.environ.get("RECSHARD_FUZZ_FROM", "1000"))
FIXED = {1: range(3), 2: range(9, 13), 3: range(8, 11), 4: range(10, 13)}  # 9, 9 and 11 have found bugs


def numbers(world: int) -> Iterator[int]:
    """The fixed cases, or other ones until the time limit."""
    if not SECONDS:
        yield from FIXED[world]
        return
    until = time.monotonic() + SECONDS / len(NODES)
    for number in count(FIRST):
        if time.monotonic() > until:
            print(f"\n{number - FIRST} cases on {world} ranks, {FIRST} to {number - 1}", flush=True)
            return
        yield number


@pytest.mark.gate
@pytest.mark.timeout(0 if SECONDS else 300)
@pytest.mark.parametrize("world", NODES)
def test_any_case_is_the_reference(world: int) -> None:
    failed = []
    with recshard_lab.launch(world, nodes=NODES[world]) as ranks:
        for number in numbers(world):
            case = draw(world, number)
            try:
                check(case, ranks)
            except (AssertionError, recshard_lab.RankError, recshard_lab.LaunchError) as error:
                failed.append(f"{error}\n{case}\nrepeat: {case.command()}")
                print(failed[-1], flush=True)
                ranks.restart()
    assert not failed, f"{len(failed)} cases failed:\n" + "\n\n".join(failed)


def test_a_wrong_number_is_found() -> None:
    """One weight, moved by little more than its bound; one row of another sample."""
    with recshard_lab.launch(2, nodes=2) as ranks:
        for number in (1, 2, 4):
            case = draw(2, number)
            bounds, told = Bounds(case), [own for own, _ in ranks.run(live, case)]
            compare(case, bounds, told)
            for own in told:  # ranks must agree
                weight = own.weights["t0"]
                weight[-1, -1] += 2 * bounds.largest() * float(weight.abs().max())
            with pytest.raises(AssertionError, match=rf"table t0(?s:.*)repeat: python -m tests\.fuzz 2 {number}"):
                compare(case, bounds, told)


def test_bounds_are_close_to_the_precision_of_each_format() -> None:
    """Bounds after six steps without codecs, as parts of a table's largest weight."""
    largest: dict[str, float] = {}
    for number in range(30):
        case = draw(2, number)
        formats = {own["data_type"].value for own in case.tables}
        if len(formats) == 1 and {kind.value for kind in case.codecs} == {"fp32"}:
            name = formats.pop()
            largest[name] = max(largest.get(name, 0.0), Bounds(case).largest())
    assert {"FP64", "FP32", "FP16"} <= largest.keys()
    assert largest["FP64"] < 1e-13
    assert largest["FP32"] < 2e-4  # Adam divides by the root of small squares
    assert largest["FP16"] < 0.05
