"""A program in a file. Reading it unpickles nothing, and evaluates no text of the file as Python.

`torch.export.load` of torch 2.13 does both. It unpickles sample inputs, weights and constants without limits, and loads
machine code. It passes sizes to sympy, which evaluates them, and builds Python code from names.

A file of `write_program` has raw tensors, plain names, and sizes, such as ``Add(Symbol('s2'), Integer(1))``. Files with
anything else are refused.

torch gets a new archive with the members that were checked, so that it reads these bytes and no others.
"""

from __future__ import annotations

import io
import json
import re
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.export import ExportedProgram

from recshard_lab.serving.export.refusals import ExportError

_SAMPLES, _GRAPH = "data/sample_inputs/model.pt", "models/model.json"
_CONFIGS = {f"data/{kind}/": f"data/{kind}/model_{kind}_config.json" for kind in ("weights", "constants")}
_MEMBER = re.compile(
    rf"archive_(format|version)|byteorder|\.\w+(/\w+)?|{_GRAPH}|{_SAMPLES}|data/weights/weight_\d+"
    rf"|data/constants/tensor_\d+|{'|'.join(_CONFIGS.values())}"
)
_NAME = re.compile(r"[\w.+* -]*")  # also a size such as 3*s37; nothing that calls or indexes
_SIZE = re.compile(r"([A-Z]\w*\(|'\w+'|-?\w+(?![\w(])|[=), ])*")  # calls are of classes, such as Symbol
_KEY = re.compile(r"[^'\"\\\n\r]*")  # of a weight
_CONTAINERS = (None, "builtins.tuple", "builtins.list", "builtins.dict")


def write_program(program: ExportedProgram, path: Path) -> None:
    """Writes a program, which has no weights. On a full disk, the writer of torch 2.13 would end the process.

    Raises:
        ExportError: the program has objects that `read_program` refuses.
    """
    buffer = io.BytesIO()
    torch.export.save(program, buffer)
    try:
        _checked(buffer)
    except ValueError as error:
        raise ExportError(f"the program of the model {error}. Fix: compute with tensors and operators alone") from error
    path.write_bytes(buffer.getbuffer())


def read_program(path: Path) -> ExportedProgram:
    """Reads a program.

    Raises:
        ValueError: the file is damaged, or it has what `write_program` does not write.
    """
    archive = io.BytesIO()
    try:
        with zipfile.ZipFile(archive, "w") as checked:
            for name, data in _checked(io.BytesIO(path.read_bytes())).items():
                checked.writestr(f"program/{name}", data)
        archive.seek(0)
        return torch.export.load(archive)
    except Exception as error:  # of a damaged file, torch and Python raise many kinds
        why = error if isinstance(error, _Refusal) else f"is damaged: {type(error).__name__}: {error}"
        first = str(why).strip().partition("\n")[0]
        raise ValueError(f"{path} {first}. Fix: save the bundle again with save_bundle, or get it again") from error


class _Refusal(ValueError):
    """What a file has, as the end of a sentence that starts with its path."""


def _checked(file: io.BytesIO) -> dict[str, bytes]:
    """The members of an archive by name, without its root folder."""
    with zipfile.ZipFile(file) as archive:
        infos = archive.infolist()
        if any(info.compress_type for info in infos) or sum(info.file_size for info in infos) > file.getbuffer().nbytes:
            raise _Refusal("has packed members, which could fill the memory")
        members = {}
        for info in infos:
            name = info.filename.partition("/")[2]
            if not _MEMBER.fullmatch(name):
                raise _Refusal(f"has the member {info.filename!r:.80}, which may be a pickle or machine code")
            members[name] = archive.read(info)
    if members[_SAMPLES]:
        raise _Refusal(f"has the member {_SAMPLES!r}, a pickle, which could run any code")
    for folder, name in _CONFIGS.items():
        for entry in json.loads(members[name].decode())["config"].values():
            stored = f"{folder}{entry['path_name']}"
            if entry["use_pickle"] is not False or stored not in members:
                raise _Refusal(f"has the member {stored!r:.80} as a pickle, which could run any code")
    _check_text(json.loads(members[_GRAPH].decode()))
    return members


def _check_text(value: Any, key: str = "", in_nodes: bool = False) -> None:
    """Checks every string of a graph. Operators may have any strings as arguments."""
    if isinstance(value, dict):
        for name, part in value.items():
            _check_text(name)
            if name == "as_operator":
                raise _Refusal(f"passes the function {part!r:.80} in the member {_GRAPH!r}, which could run any code")
            _check_text(part, name, in_nodes or name == "nodes")
    elif isinstance(value, list):
        for part in value:
            _check_text(part, key, in_nodes)
    elif isinstance(value, str) and not (in_nodes and key in ("as_string", "as_strings")):
        if key in ("in_spec", "out_spec"):
            _, spec = json.loads(value)
            _check_containers(spec)
            if key == "in_spec" and spec["children_spec"][1]["children_spec"]:
                raise _Refusal(f"has keyword arguments in the member {_GRAPH!r}, whose names become code")
        elif not (_SIZE if key == "expr_str" else _NAME).fullmatch(value):
            raise _Refusal(f"has the text {value!r:.80} in the member {_GRAPH!r}, which Python would evaluate")


def _check_containers(spec: Mapping[str, Any]) -> None:
    """Checks the containers of a program's arguments or outputs: tuples, lists, dicts."""
    keys = json.loads(spec["context"]) if spec["type"] == "builtins.dict" else []
    if spec["type"] not in _CONTAINERS or not all(isinstance(key, str) and _KEY.fullmatch(key) for key in keys):
        raise _Refusal(f"has the container {spec['type']!r:.80} in the member {_GRAPH!r}, or keys with quotes")
    for part in spec["children_spec"]:
        _check_containers(part)
