"""What a notebook defines stays what it is on its way to the ranks and back."""

from __future__ import annotations

from typing import Any

import pytest

from recshard_lab.launcher import Ranks

pytestmark = pytest.mark.timeout(60)

DEFINITIONS = """
import abc, dataclasses, enum
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
def make():
    red = Color.RED
    return {"points": [Point(1).moved()], "child": Child(), "color": red, "twice": red.twice(), "cls": Point}
FACTOR = 10
"""


@pytest.fixture
def space(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A notebook's namespace, as dill sees one: the module ``__main__``."""
    import __main__

    space = vars(__main__)
    for name in ("abc", "dataclasses", "enum", "Color", "Base", "Child", "Point", "make", "FACTOR"):
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
    pulled = ranks.pull("[Point()]")
    assert not isinstance(pulled[0][0], space["Point"])
    assert [found[0].mine for found in pulled] == [0, 1, 2]
