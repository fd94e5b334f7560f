"""What a notebook defines stays what it is on its way to the ranks and back."""

from __future__ import annotations

import os
import sys
import time
from typing import Any

import psutil
import pytest
import torch

import recshard_lab
from recshard_lab.launcher import Ranks
from recshard_lab.launcher.payload import encode
from recshard_lab.launcher.world import World

pytestmark = pytest.mark.timeout(60)

DEFINITIONS = """
import abc, dataclasses, enum, typing
class Color(enum.Enum):
    RED = 1
    def twice(self): return self.value * 2
class Base(abc.ABC):
    @abc.abstractmethod
    def of(self): ...
class Child(Base):
    def of(self): return FACTOR
@dataclasses.dataclass
class Point:
    x: int
    def moved(self): return Point(self.x + FACTOR)
Item = typing.TypeVar("Item")
class Stack(typing.Generic[Item]):
    def size(self): return 0
class Numbers(Stack[int]):
    def size(self): return super().size() + FACTOR
class Few(Numbers):
    pass
def make():
    red = Color.RED
    made = {"points": [Point(1).moved()], "child": Child(), "color": red, "twice": red.twice()}
    return made | {"cls": Point, "few": Few()}
FACTOR = 10
"""


@pytest.fixture
def space(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A notebook's namespace, as dill sees one: the module ``__main__``."""
    import __main__

    space = vars(__main__)
    for name in (
        "abc",
        "dataclasses",
        "enum",
        "typing",
        "Color",
        "Base",
        "Child",
        "Point",
        "make",
        "FACTOR",
        "Item",
        "Stack",
        "Numbers",
        "Few",
    ):
        monkeypatch.setitem(space, name, None)
    exec(compile(DEFINITIONS, "<definitions>", "exec"), space)
    return space


def test_instances_of_the_notebooks_classes_are_instances_of_them_when_they_come_back(
    ranks: Ranks, space: dict[str, Any]
) -> None:
    for made in ranks.run(space["make"]):
        assert made["points"] == [space["Point"](11)]
        assert isinstance(made["child"], space["Base"])
        assert made["color"] is space["Color"].RED
        assert made["twice"] == 2
        assert made["cls"] is space["Point"]


def test_a_class_below_a_generic_one_has_its_bases_on_the_ranks(ranks: Ranks, space: dict[str, Any]) -> None:
    few = space["Few"]
    names = ["Few", "Numbers", "Stack", "Generic", "object"]
    assert ranks.run(lambda: ([base.__name__ for base in few.__mro__], few().size())) == [(names, 10)] * 3
    assert [type(made["few"]) is few for made in ranks.run(space["make"])] == [True] * 3


def test_pushed_instances_are_pulled_as_what_they_were(ranks: Ranks, space: dict[str, Any]) -> None:
    ranks.push({"point": space["Point"](5)})
    ranks.exec("moved = [point.moved()]")
    assert ranks.pull("moved") == [[space["Point"](15)]] * 3


def test_ranks_always_work_with_the_definitions_of_now(ranks: Ranks, space: dict[str, Any]) -> None:
    ranks.run(space["make"])
    space["FACTOR"] = 20
    assert ranks.run(space["make"])[0]["points"] == [space["Point"](21)]
    exec("class Point:\n    def __init__(self, x): self.x = x\n    def moved(self): return Point(-self.x)", space)
    back = ranks.run(space["make"])[2]["points"][0]
    assert type(back) is space["Point"]
    assert back.x == -1


def test_a_class_of_a_ranks_cell_is_not_taken_for_the_notebooks_of_the_same_name(
    ranks: Ranks, space: dict[str, Any]
) -> None:
    ranks.exec("class Point:\n    def __init__(self): self.mine = rank")
    pulled = ranks.eval("[Point()]")
    assert not isinstance(pulled[0][0], space["Point"])
    assert [found[0].mine for found in pulled] == [0, 1, 2]


def test_large_tensors_arrive_exactly_and_nobody_sees_what_another_writes(ranks: Ranks) -> None:
    big = torch.randn(700, 900)
    sent = {"big": big, "again": [big, big], "weight": torch.nn.Parameter(torch.randn(600, 600)), "turned": big.t()}
    fds = psutil.Process().num_fds()
    ranks.push(sent)
    for rank, got in enumerate(ranks.eval("(big, again, weight, turned, again[0] is again[1], type(weight).__name__)")):
        assert torch.equal(got[0], big), rank
        assert torch.equal(got[1][1], big)
        assert torch.equal(got[2], sent["weight"])
        assert got[2].requires_grad
        assert torch.equal(got[3], big.t())
        assert got[4:] == (True, "Parameter")
    ranks.exec("big.fill_(rank)")
    assert [float(found.mean()) for found in ranks.pull("big")] == [0.0, 1.0, 2.0]
    (mine,) = ranks.pull("big", ranks=[1])
    mine.zero_()
    assert float(ranks.pull("big", ranks=[1])[0].mean()) == 1.0
    del mine, got
    assert psutil.Process().num_fds() == fds
    ranks.exec("del big, again, weight, turned")
    before = ranks.run(lambda: len(__import__("os").listdir("/proc/self/fd")))
    ranks.push({"big": big})
    ranks.pull("big")
    ranks.exec("del big")
    assert ranks.run(lambda: len(__import__("os").listdir("/proc/self/fd"))) == before


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.bool, torch.complex64, torch.int8])
def test_any_type_of_large_tensor_travels(ranks: Ranks, dtype: torch.dtype) -> None:
    sent = (torch.randn(2_200_000) * 3).to(dtype)
    ranks.push({"sent": sent}, ranks=[2])
    assert torch.equal(ranks.pull("sent", ranks=[2])[0], sent)


@pytest.mark.clock
@pytest.mark.skipif(sys.platform != "linux", reason="anonymous shared memory is Linux's")
def test_shared_memory_is_faster_than_the_socket_and_leaves_no_file(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent = torch.randn(8_000_000)  # 32 MB
    files = set(os.listdir("/dev/shm"))
    took: dict[bool, float] = {}
    for shared in (False, True, False, True):
        monkeypatch.setattr(World, "shares_memory", shared)
        begun = time.perf_counter()
        ranks.push({"sent": sent})
        for back in ranks.pull("sent"):
            assert back[-1] == sent[-1]
        took[shared] = min(took.get(shared, 1e9), time.perf_counter() - begun)
    assert set(os.listdir("/dev/shm")) == files
    print(f"32 MB to 3 ranks and back: {took[True] * 1e3:.0f} ms shared, {took[False] * 1e3:.0f} ms over the socket")
    assert took[True] < took[False]


@pytest.mark.gate
def test_a_cell_that_uses_a_public_name_or_a_room_can_be_carried() -> None:
    for name in dir(recshard_lab):
        space: dict[str, Any] = {"it": getattr(recshard_lab, name), "__name__": "__main__"}
        exec("def cell():\n    return it", space)
        assert encode(space["cell"])
