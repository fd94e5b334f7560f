"""What a notebook defines or imports stays what it is on its way to the ranks and back."""

from __future__ import annotations

import collections
import functools
import inspect
import os
import types
from collections.abc import Iterator
from typing import Any

import psutil
import pytest
import torch
import torch.nn.functional
import torch.optim._functional

import __main__
import recshard_lab
from recshard_lab.launcher import Ranks
from recshard_lab.launcher.payload import decode, encode
from tests.launched import launched

pytestmark = pytest.mark.timeout(60)

DEFINITIONS = """
import abc, dataclasses, enum, functools, typing
import torch
from torch.optim import SGD
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
@dataclasses.dataclass
class Settings:
    chosen: type = torch.optim.Adam
def agree(given, default=torch.optim.Adagrad):
    import torch.optim as there
    pairs = [
        (SGD, there.SGD),
        (given["argument"], there.RMSprop),
        (default, there.Adagrad),
        (given["partial"].func, there.AdamW),
        (given["settings"].chosen, there.Adam),
        (type(given["instance"]), there.Rprop),
        (SGD.step, there.SGD.step),
    ]
    return [ours is theirs for ours, theirs in pairs]
def back():
    made = SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    return made, SGD, functools.partial(torch.optim.Adam, lr=0.1), torch.nn.functional.max_pool2d
def fused():
    import recshard_lab as rs
    table = rs.EmbeddingBagConfig(10, 4, name="t", feature_names=["f"])
    return type(rs.FusedEmbeddingBagCollection([table], SGD, {"lr": 0.1})).__name__
"""

ranks = launched(2)


@pytest.fixture
def space() -> Iterator[dict[str, Any]]:
    """A notebook's definitions as dill sees them, in the module ``__main__``."""
    space = vars(__main__)
    before = dict(space)
    exec(compile(DEFINITIONS, "<definitions>", "exec"), space)
    yield space
    space.clear()
    space.update(before)


def test_instances_of_the_notebooks_classes_are_instances_of_them_when_they_come_back(
    ranks: Ranks, space: dict[str, Any]
) -> None:
    for made in ranks.run(space["make"]):
        assert made["points"] == [space["Point"](11)]
        assert isinstance(made["child"], space["Base"])
        assert made["color"] is space["Color"].RED
        assert made["twice"] == 2
        assert made["cls"] is space["Point"]
        assert type(made["few"]) is space["Few"]
    ranks.push({"point": space["Point"](5)})
    ranks.exec("moved = [point.moved()]")
    assert ranks.pull("moved") == [[space["Point"](15)]] * 2


def test_a_class_below_a_generic_one_has_its_bases_on_the_ranks(ranks: Ranks, space: dict[str, Any]) -> None:
    few = space["Few"]
    names = ["Few", "Numbers", "Stack", "Generic", "object"]
    assert ranks.run(lambda: ([base.__name__ for base in few.__mro__], few().size())) == [(names, 10)] * 2


def test_ranks_always_work_with_the_definitions_of_now(ranks: Ranks, space: dict[str, Any]) -> None:
    ranks.run(space["make"])
    space["FACTOR"] = 20
    assert ranks.run(space["make"])[0]["points"] == [space["Point"](21)]
    exec("class Point:\n    def __init__(self, x): self.x = x\n    def moved(self): return Point(-self.x)", space)
    back = ranks.run(space["make"])[1]["points"][0]
    assert type(back) is space["Point"]
    assert back.x == -1


def test_a_class_of_a_ranks_cell_is_not_taken_for_the_notebooks_of_the_same_name(
    ranks: Ranks, space: dict[str, Any]
) -> None:
    ranks.exec("class Point:\n    def __init__(self): self.mine = rank")
    pulled = ranks.eval("[Point()]")
    assert not isinstance(pulled[0][0], space["Point"])
    assert [found[0].mine for found in pulled] == [0, 1]


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
    assert [float(found.mean()) for found in ranks.pull("big")] == [0.0, 1.0]
    (mine,) = ranks.pull("big", ranks=[1])
    mine.zero_()
    assert float(ranks.pull("big", ranks=[1])[0].mean()) == 1.0
    del mine, got
    assert psutil.Process().num_fds() == fds
    ranks.exec("del big, again, weight, turned")
    before = ranks.run(lambda: len(os.listdir("/proc/self/fd")))
    ranks.push({"big": big})
    ranks.pull("big")
    ranks.exec("del big")
    assert ranks.run(lambda: len(os.listdir("/proc/self/fd"))) == before


def test_any_type_of_large_tensor_travels(ranks: Ranks) -> None:
    for dtype in (torch.bfloat16, torch.bool, torch.complex64, torch.int8):
        sent = (torch.randn(2_200_000) * 3).to(dtype)
        ranks.push({"sent": sent}, ranks=[1])
        assert torch.equal(ranks.pull("sent", ranks=[1])[0], sent)


@pytest.mark.gate
def test_a_cell_that_uses_a_public_name_or_a_room_can_be_carried() -> None:
    for name in dir(recshard_lab):
        space: dict[str, Any] = {"it": getattr(recshard_lab, name), "__name__": "__main__"}
        exec("def cell():\n    return it", space)
        assert encode(space["cell"])


OF_TORCH = (torch, torch.nn, torch.nn.functional, torch.nn.init, torch.optim, torch.distributed, torch.utils.data)
OURS = (recshard_lab.embedding, recshard_lab.optim, recshard_lab.sparse)
OTHERS = (torch.optim._functional, torch.optim.lr_scheduler, collections, functools, inspect)  # namedtuples, too
MODULES = (*OF_TORCH, *OURS, *OTHERS)
NAMELESS = (
    *("ScalingType", "SwizzleType"),  # torch 2.13 names them `_ScalingType` and `_SwizzleType`, which it lacks
    "manual_seed",  # torch._dynamo puts a wrapper into torch, and torch.random keeps the function
)
KINDS = (type, types.FunctionType, type(torch.get_device_module))  # the last: functions with a cache


def public() -> dict[tuple[str, str], Any]:
    """Module and name -> the public classes and functions of `MODULES`."""
    named = {(module.__name__, name): getattr(module, name) for module in MODULES for name in dir(module)}
    return {
        (module, name): value
        for (module, name), value in named.items()
        if issubclass(type(value), KINDS) and not name.startswith("_") and name not in NAMELESS
    }


def test_public_classes_and_functions_are_the_same_objects_on_ranks_and_back(ranks: Ranks) -> None:
    sent = public()
    assert len(sent) > 800
    ranks.push({"sent": sent})
    ranks.exec(
        "import importlib\n"
        "copies = [key for key, value in sent.items() if getattr(importlib.import_module(key[0]), key[1]) is not value]"
    )
    assert ranks.pull("copies") == [[], []]
    for came in ranks.pull("sent"):
        assert [key for key in sent if came[key] is not sent[key]] == []


def test_an_imported_optimizer_is_itself_wherever_a_notebook_holds_it(ranks: Ranks, space: dict[str, Any]) -> None:
    given = {
        "argument": torch.optim.RMSprop,
        "partial": functools.partial(torch.optim.AdamW, lr=0.1),
        "settings": space["Settings"](),
        "instance": torch.optim.Rprop([torch.nn.Parameter(torch.ones(1))]),
    }
    assert ranks.run(space["agree"], given) == [[True] * 7] * 2
    for made, kind, adam, pool in ranks.run(space["back"]):
        assert type(made) is kind is torch.optim.SGD
        assert isinstance(made, torch.optim.Optimizer)
        assert adam.func is torch.optim.Adam
        assert pool is torch.nn.functional.max_pool2d
    assert ranks.run(space["fused"]) == ["FusedEmbeddingBagCollection"] * 2


def test_a_class_that_no_imported_module_has_is_sent_by_value() -> None:
    """One of a module that the notebook has made, and one with the name of another."""
    made = types.ModuleType("made")
    exec("class Kind:\n    size = 3", made.__dict__)
    hidden = type("SGD", (), {"__module__": "torch.optim.sgd", "size": 3})
    for kind in (made.Kind, hidden):
        came = decode(encode(kind))
        assert came is not kind
        assert came.size == 3
