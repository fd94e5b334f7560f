"""Private parts of torch and other packages that the library uses. The tests of the rooms that use them run them.

A new release may change them. pyproject.toml bounds the versions of these packages. Before you raise a bound, run all
tests under the new release. The last tests here are of parts that no other test runs.
"""

from __future__ import annotations

import ast
import inspect
import io
import os
import re
import tomllib
from collections import defaultdict
from contextlib import redirect_stdout
from pathlib import Path

import pytest
import torch
from IPython.core.interactiveshell import InteractiveShell
from multiprocess.connection import Connection

import recshard_lab
from recshard_lab.launcher.engines.spawn import _Process

PACKAGE = Path(recshard_lab.__file__).parent
OTHERS = ("IPython", "anywidget", "dill", "ipykernel", "ipywidgets", "llvmlite", "multiprocess", "numba", "torch")
UNDOCUMENTED = ("multiprocess.", "numba.core.cgutils", "torch.distributed.c10d_logger")  # private, no underscore
PRIVATE = re.compile(r"_(?!_|repr_|ipython_|recshard_)\w+")
OVERRIDDEN = set(filter(PRIVATE.fullmatch, dir(torch.nn.Module())))


def private_uses() -> dict[str, set[str]]:
    """Private module, or attribute as ``._name`` -> files of the library that use it."""
    nodes = {file: [*ast.walk(ast.parse(file.read_text()))] for file in PACKAGE.rglob("*.py")}
    ours = {name for part in nodes.values() for node in part for name in _defined(node)} - OVERRIDDEN
    found = defaultdict(set)
    for file, part in nodes.items():
        for name in {name for node in part for name in _used(node)} - {f".{name}" for name in ours}:
            found[name].add(str(file.relative_to(PACKAGE)))
    return dict(found)


def _defined(node: ast.AST) -> list[str]:
    """Names that a node gives to a function, a class, a variable, or an attribute."""
    match node:
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            return [name]
        case (
            ast.Name(id=name, ctx=ast.Store())
            | ast.Attribute(value=ast.Name(id="self" | "cls"), attr=name, ctx=ast.Store())
        ):
            return [name]
    return []


def _used(node: ast.AST) -> list[str]:
    match node:
        case ast.Import(names=names):
            return [name for alias in names if (name := _private(alias.name))]
        case ast.ImportFrom(module=str(module), level=0, names=names):
            return [name for alias in names if (name := _private(f"{module}.{alias.name}"))]
        case ast.Attribute(value=ast.Name(id="os" | "sys")):
            return []
        case ast.FunctionDef(name=name) if name in OVERRIDDEN:
            return [f".{name}"]
        case (
            ast.Attribute(attr=name)
            | ast.Call(
                func=ast.Name(id="getattr" | "setattr" | "hasattr" | "delattr"),
                args=[_, ast.Constant(value=str(name)), *_],
            )
        ) if PRIVATE.fullmatch(name):
            return [f".{name}"]
    return []


def _private(dotted: str) -> str:
    """The path of another package up to its last private part. Empty if all of it is public."""
    parts = dotted.split(".")
    if parts[0] not in OTHERS:
        return ""
    private = [place for place, part in enumerate(parts, 1) if PRIVATE.fullmatch(part)]
    return ".".join(parts[: private[-1]] if private else parts * dotted.startswith(UNDOCUMENTED))


PARTS = """
._C ._Options ._ZN4c10d12ProcessGroup17release_resourcesEv ._apply ._assert_async ._buffers ._cdata
._current_graph_task_id ._devices ._dill ._embedding_bag_per_sample_weights_backward ._execution_engine
._filename_map ._foreach_add ._forward_hooks ._forward_pre_hooks ._get_backend ._get_compiled_object
._get_default_store ._get_default_timeout ._get_deterministic_fill_uninitialized_memory ._get_local_used_map
._get_name ._get_sequence_number_for_group ._get_zeros_like_grad_buckets ._in_backward_optimizers ._inductor
._init_from_local_shards_and_global_metadata ._is_profiler_enabled ._is_protocol ._load_from_state_dict
._main_module ._modules ._new_process_group_helper ._optimizer_classes ._parameters ._parse_visible_devices
._raw_device_uuid_nvml ._record_memory_history ._register_backend ._reloader ._render_traceback_ ._run_exitfuncs
._save_to_state_dict ._schema ._set_deterministic_algorithms ._set_deterministic_fill_uninitialized_memory
._set_group_name ._set_params_and_buffers_to_ignore_for_model ._snapshot ._timeout ._torchdynamo_disable
._version multiprocess.connection.Connection multiprocess.context multiprocess.popen_spawn_posix
multiprocess.resource_tracker multiprocess.spawn multiprocess.util numba.core.cgutils torch._C._distributed_c10d
torch.distributed._shard torch.distributed.c10d_logger torch.distributed.checkpoint.filesystem._StorageInfo
torch.distributed.tensor._shards_wrapper torch.fx._pytree torch.fx._symbolic_trace torch.fx.experimental._config
torch.nn.modules.loss._Loss torch.utils._python_dispatch torch.utils._pytree
"""


@pytest.mark.gate
def test_every_private_use_of_another_package_is_in_the_table() -> None:
    found, known = private_uses(), set(PARTS.split())
    new = {name: sorted(files) for name, files in found.items() if name not in known}
    assert new == {}, "use a public part, or add it to PARTS if a test fails without it"
    assert sorted(known - set(found)) == [], "no longer used: remove them from PARTS"


def test_a_process_starts_without_the_notebooks_main_module() -> None:
    read, write = os.pipe()
    code = "import os, sys; os.write(out.fileno(), repr([*vars(sys.modules['__main__'])]).encode()); os._exit(7)"
    process = _Process(target=exec, args=(code, {"out": Connection(write, readable=False)}))
    process.start()
    process.join()
    assert process.exitcode == 7
    assert "__mp_main__" not in os.read(read, 9999).decode()
    os.close(read)


def test_a_shell_shows_what_an_error_renders_and_numbers_its_cells() -> None:
    shell = InteractiveShell()
    error = ValueError("a message")
    error._render_traceback_ = lambda: ["rendered by the error"]  # type: ignore[attr-defined]
    shell.user_ns["error"] = error
    with redirect_stdout(io.StringIO()) as shown:
        shell.run_cell("raise error")
    assert shown.getvalue() == "rendered by the error\n"
    name = shell.compile.cache("x = 1", 3)
    assert shell.compile._filename_map[name] == 3
    shell.run_line_magic("load_ext", "autoreload")
    shell.run_line_magic("autoreload", "2")
    reloader = shell.magics_manager.registry["AutoreloadMagics"]._reloader
    assert (reloader.enabled, reloader.check_all) == (True, True)
    shell.run_line_magic("autoreload", "0")
    assert not reloader.enabled


def test_the_history_of_allocations_has_its_arguments() -> None:
    """What a machine without a GPU can check; the next test checks the rest."""
    assert next(iter(inspect.signature(torch.cuda.memory._record_memory_history).parameters)) == "enabled"
    assert callable(torch.cuda.memory._snapshot)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_an_allocation_on_a_gpu_is_recorded() -> None:
    torch.cuda.memory._record_memory_history("all")
    kept = torch.zeros(1 << 20, device="cuda")
    snapshot = torch.cuda.memory._snapshot()
    torch.cuda.memory._record_memory_history(None)
    assert any(segment["total_size"] >= kept.numel() * 4 for segment in snapshot["segments"])
    assert any(entry["action"] == "alloc" for trace in snapshot["device_traces"] for entry in trace)


def test_packages_with_private_uses_have_an_upper_bound() -> None:
    project = tomllib.loads(PACKAGE.with_name("pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"].values()
    required = [*project["dependencies"], *(line for lines in extras for line in lines)]
    for package in ("torch", "dill", "multiprocess", "ipykernel", "ipython", "numba"):  # numba requires one llvmlite
        bounds = [line for line in required if re.match(rf"{package}[<>=]", line)]
        assert bounds, package
        assert [line for line in bounds if "<" not in line and "==" not in line] == []
