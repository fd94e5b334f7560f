"""Reading a bundle's program runs nothing of the file: pickles, machine code, and text that Python would evaluate."""

from __future__ import annotations

import io
import json
import pickle
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from recshard_lab import EmbeddingBagCollection
from recshard_lab.serving import BundleError, ExportError, Inputs, load_bundle, save_bundle
from recshard_lab.serving.bundle import FORMAT
from recshard_lab.serving.export.stored_program import write_program
from tests.forged import forged, malice
from tests.serving.bundles import batch_of, tables

GRAPH, SAMPLES = "models/model.json", "data/sample_inputs/model.pt"
PROGRAM, CONSTANTS = "program.pt2", "data/constants/model_constants_config.json"

Members = dict[str, bytes]


class Scaled(nn.Module):
    """A model whose program has a constant."""

    def __init__(self) -> None:
        super().__init__()
        self.bags = EmbeddingBagCollection(tables(features=1))

    def forward(self, features: Any) -> Tensor:
        rows: Tensor = self.bags(features).values()
        return rows * torch.tensor([1.5, 2.5, 3.5, 4.5, 5.5, 6.5, 7.5, 8.5])


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bundles") / "1"
    model = Scaled().eval()
    save_bundle(model, path, inputs=Inputs.of(model))
    return path


def members_of(program: Path) -> Members:
    with zipfile.ZipFile(program) as archive:
        return {name.partition("/")[2]: archive.read(name) for name in archive.namelist()}


def archive_of(members: Members, root: str = "program/", **more: Any) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", **more) as archive:
        for name, data in members.items():
            archive.writestr(f"{root}{name}", data)
    return file.getvalue()


def saved(value: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def constant(members: Members, **entry: Any) -> None:
    """Changes the entry of the only constant."""
    config = json.loads(members[CONSTANTS])
    (own,) = config["config"].values()
    own.update(entry)
    members[CONSTANTS] = json.dumps(config).encode()


def text(members: Members, edit: Callable[[Any], None]) -> None:
    graph = json.loads(members[GRAPH])
    edit(graph)
    members[GRAPH] = json.dumps(graph).encode()


def every(value: Any, key: str, other: Any) -> None:
    """Replaces the value of a key everywhere."""
    for name, part in list(value.items() if isinstance(value, dict) else enumerate(value)):
        if name == key:
            value[name] = other
        elif isinstance(part, (dict, list)):
            every(part, key, other)


def call(mark: Path) -> str:
    return f"__import__('os').mkdir('{mark}')"


def specs(value: dict[str, Any], keywords: list[Any], context: str = "[]", kind: str = "builtins.dict") -> None:
    """Gives the program keyword arguments."""
    arguments = json.loads(value["graph_module"]["module_call_graph"][0]["signature"]["in_spec"])
    arguments[1]["children_spec"][1].update({"type": kind, "context": context, "children_spec": keywords})
    every(value, "in_spec", json.dumps(arguments))


def operator(value: dict[str, Any], target: str, **argument: str) -> None:
    node = next(node for node in value["graph_module"]["graph"]["nodes"] if node["target"].endswith("mul.Tensor"))
    node["target"] = target
    node["inputs"] = [{"name": "", "arg": {key: one}, "kind": 1} for key, one in argument.items()]


LEAF = {"type": None, "context": None, "children_spec": []}
CASES: dict[str, tuple[Callable[[Members, Path], Any], str]] = {
    "sample inputs": (
        lambda m, mark: m.update({SAMPLES: saved({"x": malice(mark)})}),
        r"has the member 'data/sample_inputs/model.pt', a pickle, which could run any code",
    ),
    "a constant": (
        lambda m, mark: (m.update({"data/constants/tensor_0": saved(malice(mark))}), constant(m, use_pickle=True)),
        r"has the member 'data/constants/tensor_0' as a pickle",
    ),
    "an opaque constant": (
        lambda m, mark: (
            m.update({"data/constants/opaque_obj_0": pickle.dumps(malice(mark))}),
            constant(m, path_name="opaque_obj_0", use_pickle=True),
        ),
        r"has the member 'program/data/constants/opaque_obj_0', which may be a pickle",
    ),
    "machine code": (
        lambda m, mark: m.update({"data/aotinductor/model/model.so": b""}),
        r"has the member 'program/data/aotinductor/model/model.so', which may be a pickle or machine code",
    ),
    "a size": (
        lambda m, mark: text(m, lambda graph: every(graph, "expr_str", call(mark))),
        r"has the text \"__import__.* in the member 'models/model.json', which Python would evaluate",
    ),
    "a keyword argument": (
        lambda m, mark: text(m, lambda graph: specs(graph, [LEAF], '["x=exit()"]')),
        r"has keyword arguments in the member 'models/model.json', whose names become code",
    ),
    "a container that imports a module": (
        lambda m, mark: text(m, lambda graph: specs(graph, [], '{"default_factory_module": "this"}', "defaultdict")),
        r"has the container 'defaultdict' in the member 'models/model.json'",
    ),
    "an operator": (
        lambda m, mark: text(m, lambda graph: operator(graph, "torch.serialization.os.mkdir", as_string=str(mark))),
        r"is damaged: SpecViolationError: Operator '<built-in function mkdir>' is not an allowed operator",
    ),
    "an operator that calls": (
        lambda m, mark: text(
            m,
            lambda graph: operator(
                graph,
                "torch.ops.higher_order.wrap",
                as_operator="torch.serialization.os.mkdir",
                as_string=str(mark),
            ),
        ),
        r"passes the function 'torch.serialization.os.mkdir'",
    ),
    "no graph": (lambda m, mark: m.pop(GRAPH), r"is damaged: KeyError"),
}


@pytest.mark.parametrize("name", CASES)
def test_code_in_a_program_is_refused_by_member_and_does_not_run(name: str, bundle: Path, tmp_path: Path) -> None:
    edit, why = CASES[name]
    mark, members = tmp_path / "ran", members_of(bundle / "program.pt2")
    edit(members, mark)
    folder = forged(bundle, tmp_path / "crafted", {PROGRAM: archive_of(members)}, FORMAT)
    with pytest.raises(BundleError, match=f"/crafted/program.pt2 {why}") as refused:
        load_bundle(folder, check_hashes=True)
    assert str(refused.value).endswith(". Fix: save the bundle again with save_bundle, or get it again")
    assert not mark.exists()


def test_archives_that_readers_understand_differently_are_harmless(bundle: Path, tmp_path: Path) -> None:
    """Of two members of one name, and of two archives in one file, torch reads the members that were checked."""
    members, mark = members_of(bundle / "program.pt2"), tmp_path / "ran"
    evil = saved({"x": malice(mark)})
    twice = io.BytesIO(archive_of({SAMPLES: evil}))
    with warnings.catch_warnings(), zipfile.ZipFile(twice, "a") as archive:
        warnings.simplefilter("ignore")  # the name is a duplicate
        for name, data in members.items():
            archive.writestr(f"program/{name}", data)
    older = {"version": b"8.20", "serialized_exported_program.json": members[GRAPH], "serialized_state_dict.pt": evil}
    files = {"first": twice.getvalue(), "prefix": archive_of({**members, SAMPLES: evil}) + archive_of(members)}
    expected = load_bundle(bundle).predict(batch := batch_of(load_bundle(bundle).inputs, 3))["score"]
    for name, data in files.items():
        answer = load_bundle(forged(bundle, tmp_path / name, {PROGRAM: data}, FORMAT)).predict(batch)["score"]
        assert torch.equal(answer, expected), name
    refused = {
        "packed": archive_of(members, compression=zipfile.ZIP_DEFLATED),
        "older": archive_of(older, root=""),
        "cut off": archive_of(members)[:-30],
        "empty": b"",
    }
    for name, data in refused.items():
        folder = forged(bundle, tmp_path / name, {PROGRAM: data}, FORMAT)
        with pytest.raises(BundleError, match=r"program.pt2 (has packed members|has the member 'version'|is damaged)"):
            load_bundle(folder)
    assert not mark.exists()


def test_a_program_that_would_not_be_read_is_not_written(tmp_path: Path) -> None:
    program = torch.export.export(nn.ReLU(), (torch.zeros(1),))  # has its example inputs
    with pytest.raises(
        ExportError, match=r"has the member .*model.pt', a pickle, which could run any code. Fix: compute"
    ):
        write_program(program, tmp_path / "program.pt2")
    assert not list(tmp_path.iterdir())
