"""What the notebook has imported is the same object on the ranks, and what ranks have imported the same here."""

from __future__ import annotations

import collections
import functools
import inspect
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional
import torch.optim._functional

import recshard_lab
from recshard_lab.launcher import Ranks, launch
from recshard_lab.launcher.payload import decode, encode

pytestmark = pytest.mark.timeout(60)

MODULES = [
    torch,
    torch.nn,
    torch.nn.functional,
    torch.nn.init,
    torch.optim,
    torch.optim._functional,
    torch.optim.lr_scheduler,
    torch.distributed,
    torch.utils.data,
    recshard_lab.embedding,
    recshard_lab.optim,
    recshard_lab.sparse,
    collections,
    functools,
    inspect,  # has namedtuples
]
NAMELESS = (
    *("ScalingType", "SwizzleType"),  # torch 2.13 names them `_ScalingType` and `_SwizzleType`, which it lacks
    "manual_seed",  # torch._dynamo puts a wrapper into torch, and torch.random keeps the function
)
KINDS = (type, types.FunctionType, type(torch.get_device_module))  # the last: functions with a cache

NOTEBOOK = """
import dataclasses, functools
import torch
from torch.optim import SGD
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
        (Settings().chosen, there.Adam),
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


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with launch(2) as running:
        yield running


@pytest.fixture
def notebook(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A notebook's definitions, in the module ``__main__``."""
    import __main__

    names = ("dataclasses", "functools", "torch", "SGD", "Settings", "agree", "back", "fused")
    for name in names:
        monkeypatch.setitem(vars(__main__), name, None)
    exec(NOTEBOOK, vars(__main__))
    return vars(__main__)


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


def test_an_imported_optimizer_is_itself_wherever_a_notebook_holds_it(ranks: Ranks, notebook: dict[str, Any]) -> None:
    given = {
        "argument": torch.optim.RMSprop,
        "partial": functools.partial(torch.optim.AdamW, lr=0.1),
        "settings": notebook["Settings"](),
        "instance": torch.optim.Rprop([torch.nn.Parameter(torch.ones(1))]),
    }
    assert ranks.run(notebook["agree"], given) == [[True] * 8] * 2
    for made, kind, adam, pool in ranks.run(notebook["back"]):
        assert type(made) is kind is torch.optim.SGD
        assert isinstance(made, torch.optim.Optimizer)
        assert adam.func is torch.optim.Adam
        assert pool is torch.nn.functional.max_pool2d
    assert ranks.run(notebook["fused"]) == ["FusedEmbeddingBagCollection"] * 2


def test_a_class_that_no_imported_module_has_is_sent_by_value() -> None:
    """One of a module that the notebook has made, and one with the name of another."""
    made = types.ModuleType("made")
    exec("class Kind:\n    size = 3", made.__dict__)
    hidden = type("SGD", (), {"__module__": "torch.optim.sgd", "size": 3})
    for kind in (made.Kind, hidden):
        came = decode(encode(kind))
        assert came is not kind
        assert came.size == 3
