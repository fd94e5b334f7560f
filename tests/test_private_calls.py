"""Private parts of torch and other packages that the library uses: each is in a table, with a test of what it must do.

A new release may change them. pyproject.toml bounds the versions of these packages. If a test here fails under a new
release, change the code that the table names, then raise the bound.
"""

from __future__ import annotations

import ast
import ctypes
import inspect
import io
import os
import pickle
import pydoc
import re
import subprocess
import sys
import tomllib
from collections import defaultdict
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import dill
import pytest
import torch
import torch.distributed as dist

import recshard_lab
from recshard_lab.launcher import Ranks, launch

pytestmark = pytest.mark.timeout(120)

PACKAGE = Path(recshard_lab.__file__).parent
OTHERS = ("IPython", "anywidget", "dill", "ipykernel", "ipywidgets", "llvmlite", "multiprocess", "numba", "torch")
UNDOCUMENTED = [  # private, without an underscore
    *(f"multiprocess.{module}" for module in ("context", "popen_spawn_posix", "resource_tracker", "spawn", "util")),
    "numba.core.cgutils",
    "torch.distributed.c10d_logger",
]
PRIVATE = re.compile(r"_(?!_|repr_|ipython_|recshard_)\w+")


def private_uses() -> dict[str, set[str]]:
    """Private name -> files of the library that use it. ``._name`` is an attribute of an object."""
    nodes = {file: _nodes(file) for file in PACKAGE.rglob("*.py")}
    ours = {name for part in nodes.values() for node in part for name in _defined(node)}
    found = defaultdict(set)
    for file, part in nodes.items():
        for name in _used(part, ours):
            found[name].add(str(file.relative_to(PACKAGE)))
    return dict(found)


def _nodes(file: Path) -> list[ast.AST]:
    """The nodes of a file that the functions below look at."""
    kinds = (ast.Name, ast.Attribute, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Constant)
    kinds += (ast.Import, ast.ImportFrom, ast.Assign, ast.Call)
    return [node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, kinds)]


def _defined(node: ast.AST) -> list[str]:
    """Names that a node gives to a function, a class, a variable, or an attribute of ``self``."""
    match node:
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            return [name]
        case ast.Name(id=name, ctx=ast.Store()):
            return [name]
        case ast.Attribute(value=ast.Name(id="self" | "cls"), attr=name, ctx=ast.Store()):
            return [name]
    return []


def _used(nodes: list[ast.AST], ours: set[str]) -> set[str]:
    known: dict[str, str] = {}  # variable -> module or attribute of another package, or a string
    found = set()
    for node in nodes:
        match node:
            case ast.Import(names=names):
                for alias in names:
                    known[alias.asname or alias.name.split(".")[0]] = (
                        alias.name if alias.asname else alias.name.split(".")[0]
                    )
                    found.add(_key(alias.name))
            case ast.ImportFrom(module=str(module), level=0, names=names) if module.split(".")[0] in OTHERS:
                for alias in names:
                    known[alias.asname or alias.name] = f"{module}.{alias.name}"
                    found.add(_key(f"{module}.{alias.name}"))
    for node in nodes:
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=value) if _dotted(value, known):
                known[name] = _dotted(value, known)
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Constant(value=str(text))) if PRIVATE.fullmatch(
                text
            ):
                known[name] = text
    for node in nodes:
        match node:
            case ast.Attribute(attr=name):
                dotted = _dotted(node, known)
                if dotted:
                    found.add(_key(dotted))
                elif PRIVATE.fullmatch(name) and name not in ours and _root(node) not in ("os", "sys"):
                    found.add(f".{name}")
            case ast.Call(func=ast.Name(id="getattr" | "setattr" | "hasattr" | "delattr"), args=[_, name, *_]):
                text = name.value if isinstance(name, ast.Constant) else known.get(getattr(name, "id", ""), "")
                if PRIVATE.fullmatch(str(text)) and text not in ours:
                    found.add(f".{text}")
            case ast.ClassDef(bases=bases, body=body):
                for base in filter(None, (_dotted(base, known) for base in bases)):
                    methods = {f"{base}.{part.name}" for part in body if isinstance(part, ast.FunctionDef)}
                    found |= {name for name in methods if _key(name) == name and pydoc.locate(name)}
            case ast.Constant(value=str(text)) if re.fullmatch(r"_ZTV\w+|_dump_\w+", text):
                found.add(f".{text}")
    return {name for name in found if name and not any(longer.startswith(f"{name}.") for longer in found)}


def _root(node: ast.expr) -> str:
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def _dotted(node: ast.expr, known: dict[str, str]) -> str:
    """``torch.distributed.is_initialized`` for `dist.is_initialized`; empty if it is of no other package."""
    names = []
    while isinstance(node, ast.Attribute):
        names.append(node.attr)
        node = node.value
    start = known.get(node.id, "") if isinstance(node, ast.Name) else ""
    return ".".join([start, *reversed(names)]) if start.split(".")[0] in OTHERS else ""


def _key(dotted: str) -> str:
    """The path up to its last private part; empty if all of it is public."""
    parts = dotted.split(".")
    if parts[0] not in OTHERS:
        return ""
    private = [place for place, part in enumerate(parts) if PRIVATE.fullmatch(part)]
    if private:
        return ".".join(parts[: private[-1] + 1])
    return next((module for module in UNDOCUMENTED if f"{dotted}.".startswith(f"{module}.")), "")


# -- what each must do, on a separate rank ----------------------------------------------------------


def default_group() -> Any:
    return next(iter(dist.distributed_c10d._world.pg_map))


def backends_are_replaced_inside_a_group() -> None:
    from recshard_lab.launcher.groups import _drop_backends

    group, cpu = default_group(), torch.device("cpu")
    assert dist.distributed_c10d._world.pg_group_ranks[group] == {0: 0}
    assert isinstance(dist.distributed_c10d._world.group_count, int)
    gloo = group._get_backend(cpu)
    before = gloo._get_sequence_number_for_group()
    dist.all_reduce(torch.ones(1))
    assert gloo._get_sequence_number_for_group() == before + 1
    fresh = dist.ProcessGroupGloo(dist.PrefixStore("fresh", dist.HashStore()), 0, 1, timedelta(seconds=30))
    _drop_backends(group)
    for device in ("cpu", "cuda"):
        with pytest.raises(RuntimeError):
            group._get_backend(torch.device(device))
    group._register_backend(cpu, dist.ProcessGroup.BackendType.GLOO, fresh)
    group._set_group_name("0")
    assert group._get_backend(cpu)._get_sequence_number_for_group() != before + 1
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total.item() == 1


def a_backend_shares_the_devices_of_another() -> None:
    other = default_group()._get_backend(torch.device("cpu"))
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices, options._threads, options._timeout = other.options._devices, 1, timedelta(seconds=7)
    backend = dist.ProcessGroupGloo(dist.HashStore(), 0, 1, options)
    total = torch.ones(1)
    backend.allreduce([total]).wait()
    assert total.item() == 1
    assert backend._get_sequence_number_for_group() == 1
    assert backend.options._timeout == timedelta(seconds=7)
    assert len(backend.options._devices) == len(other.options._devices)


def a_group_is_made_by_its_members_alone() -> None:
    c10d = dist.distributed_c10d
    store = c10d._get_default_store()
    store.set("canary", "value")
    assert dist.PrefixStore("", store).underlying_store is not None
    assert store.get("canary") == b"value"
    kind = c10d.Backend("gloo")
    timeout = c10d._get_default_timeout(kind)
    assert isinstance(timeout, timedelta)
    group, _ = c10d._new_process_group_helper(
        1, 0, [0], kind, store, group_name=c10d.GroupName("canary"), timeout=timeout, backend_options=None
    )
    c10d._world.pg_group_ranks[group] = {0: 0}
    total = torch.ones(1)
    dist.all_reduce(total, group=group)
    assert group in c10d._world.pg_map
    assert dist.get_process_group_ranks(group) == [0]


def stores_are_served_on_a_socket_that_listens() -> None:
    import socket

    from torch._C._distributed_c10d import FileStore, HashStore, TCPStore

    listener = socket.create_server(("127.0.0.1", 0))
    host, port = listener.getsockname()
    server = TCPStore(host, port, None, True, wait_for_workers=False, master_listen_fd=listener.detach())
    TCPStore(host, port, 1, False).set("key", "value")
    assert server.get("key") == b"value"
    file = FileStore(f"/tmp/canary-{os.getpid()}", 1)
    for store in (file, HashStore()):
        store.set("key", "value")
        assert store.get("key") == b"value"
    os.unlink(f"/tmp/canary-{os.getpid()}")


def collectives_are_recorded_with_their_lines() -> None:
    import torch._C._distributed_c10d as c10d

    dist.all_reduce(torch.ones(3))
    entries = pickle.loads(c10d._dump_fr_trace(True, True, False))["entries"]
    newest = max(entries, key=lambda entry: entry["record_id"])
    assert newest["profiling_name"].endswith("all_reduce")
    assert newest["input_sizes"] == [[3]]
    assert {"process_group", "pg_id", "collective_seq_id", "is_p2p"} <= set(newest)
    assert Path(__file__).name in {Path(frame["filename"]).name for frame in newest["frames"]}
    others = getattr(c10d, "_dump_nccl_trace", None)  # only in a build with NCCL
    assert others is None or "entries" in pickle.loads(others(True, False, False))


def collectives_are_wrapped_by_a_file_of_torch() -> None:
    import torch.distributed.c10d_logger

    assert dist.all_reduce.__code__.co_filename == torch.distributed.c10d_logger.__file__


def the_main_module_of_functions_is_the_ranks() -> None:
    assert dill._dill._main_module is sys.modules["__main__"]
    exec("factor = 3\ndef times(x): return factor * x", sys.modules["__main__"].__dict__)
    data = dill.dumps(sys.modules["__main__"].times, recurse=True)
    sys.modules["__main__"].factor = 5  # type: ignore[attr-defined]
    assert dill.loads(data)(2) in (6, 10)


def the_deterministic_mode_is_set_without_dynamo() -> None:
    before = torch.are_deterministic_algorithms_enabled()
    fills = torch._C._get_deterministic_fill_uninitialized_memory()
    torch._C._set_deterministic_algorithms(True, warn_only=True)
    torch._C._set_deterministic_fill_uninitialized_memory(not fills)
    assert torch.are_deterministic_algorithms_enabled()
    assert torch.is_deterministic_algorithms_warn_only_enabled()
    assert torch._C._get_deterministic_fill_uninitialized_memory() is not fills
    torch._C._set_deterministic_algorithms(before, warn_only=False)
    torch._C._set_deterministic_fill_uninitialized_memory(fills)


def an_assertion_names_its_message() -> None:
    torch._assert_async(torch.tensor(True), "fine")
    with pytest.raises(RuntimeError, match="an id that is not a row"):
        torch._assert_async(torch.tensor(False), "an id that is not a row")


def a_traced_program_takes_sizes_0_and_1_and_parts_of_unknown_length() -> None:
    import torch.fx.experimental._config

    class Parts(torch.nn.Module):
        def forward(self, values: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
            first, second = lengths.tolist()
            torch._check(first >= 0)
            torch._check(first + second == values.shape[0])
            return values[:first].sum() * 2 + values[first:].sum()

    symbols: Any = torch.fx.experimental._config
    with symbols.patch(backed_size_oblivious=True):
        shapes = {"values": {0: torch.export.Dim("N", min=0, max=2**40)}, "lengths": None}
        program = torch.export.export(Parts(), (torch.ones(3), torch.tensor([1, 2])), dynamic_shapes=shapes)
    for first, second in [(0, 0), (1, 0), (0, 1), (2, 5)]:
        answer = program.module()(torch.ones(first + second), torch.tensor([first, second]))
        assert float(answer) == 2 * first + second


def programs_are_compiled_into_packages() -> None:
    """Their arguments; `tests/serving/test_compiled.py` compiles a program and loads the package."""
    compile_arguments = inspect.signature(torch._inductor.aoti_compile_and_package).parameters
    assert next(iter(compile_arguments)) == "exported_program"
    assert "package_path" in compile_arguments
    assert next(iter(inspect.signature(torch._inductor.aoti_load_package).parameters)) == "path"


def a_module_lists_its_forward_hooks() -> None:
    module = torch.nn.Linear(1, 1)
    assert not module._forward_hooks
    assert not module._forward_pre_hooks
    module.register_forward_hook(lambda *_: None)
    module.register_forward_pre_hook(lambda *_: None)
    assert len(module._forward_hooks) == len(module._forward_pre_hooks) == 1


def a_storage_has_an_identity() -> None:
    tensor, other = torch.zeros(4), torch.zeros(4)
    assert tensor.untyped_storage()._cdata == tensor[2:].untyped_storage()._cdata
    assert tensor.untyped_storage()._cdata != other.untyped_storage()._cdata


def lists_of_tensors_are_added() -> None:
    pair = [torch.ones(2), torch.ones(3)]
    assert [t.tolist() for t in torch._foreach_add(pair, [1.0, 2.0])] == [[2.0, 2.0], [3.0, 3.0, 3.0]]
    assert [t.tolist() for t in torch._foreach_add(pair, pair)] == [[2.0, 2.0], [2.0, 2.0, 2.0]]


def a_callback_runs_at_the_end_of_backward() -> None:
    seen: list[bool] = []
    first, last = torch.ones(1, requires_grad=True), torch.ones(1, requires_grad=True)
    engine = torch.autograd.Variable._execution_engine
    middle = last * 2
    middle.register_hook(lambda _: engine.queue_callback(lambda: seen.append(first.grad is not None)))
    (middle + first * 3).sum().backward()
    assert seen == [True]

    def fails() -> None:
        raise ValueError("from a callback")

    middle = last * 2
    middle.register_hook(lambda _: engine.queue_callback(fails))
    with pytest.raises(ValueError, match="from a callback"):
        middle.sum().backward()


def ddp_lists_its_buckets_and_parameters() -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.ignored = torch.nn.Linear(3, 1), torch.nn.Linear(2, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.used(x)

    outputs = []

    class Searching(torch.nn.parallel.DistributedDataParallel):
        def _post_forward(self, output: Any) -> Any:
            outputs.append(output)
            return super()._post_forward(output)

    model = Model()
    Searching._set_params_and_buffers_to_ignore_for_model(model, ["ignored.weight", "ignored.bias"])
    ddp = Searching(model, find_unused_parameters=True)
    ddp(torch.ones(1, 3)).sum().backward()
    assert len(outputs) == 1
    (bucket,) = ddp.reducer._get_zeros_like_grad_buckets()
    assert bucket.buffer().tolist() == [0.0] * 4  # three weights and a bias, without those that are ignored
    assert ddp.reducer._get_local_used_map().numel() == 2


def per_sample_weights_have_the_formula_of_embedding_bag() -> None:
    weight, grads = torch.rand(5, 4), torch.rand(2, 4)
    rows, bags = torch.tensor([0, 3, 4]), torch.tensor([0, 0, 1])
    product = torch.ops.aten._embedding_bag_per_sample_weights_backward
    found = product(grads, weight, rows, bags[:0], bags, 0)
    torch.testing.assert_close(found, (grads[bags] * weight[rows]).sum(1))


def visible_devices_are_read_as_cuda_does() -> None:
    for text, expected in (("1,0", [1, 0]), ("GPU-ab,GPU-cd", ["GPU-ab", "GPU-cd"]), ("", [])):
        os.environ["CUDA_VISIBLE_DEVICES"] = text
        assert torch.cuda._parse_visible_devices() == expected
    del os.environ["CUDA_VISIBLE_DEVICES"]
    try:
        found = torch.cuda._raw_device_uuid_nvml()
    except OSError:  # no NVML
        return
    assert found is None or all(uuid.startswith("GPU-") for uuid in found)


def allocations_of_cuda_are_recorded() -> None:
    """What a machine without a GPU can check; `test_an_allocation_on_a_gpu_is_recorded` checks the rest."""
    assert next(iter(inspect.signature(torch.cuda.memory._record_memory_history).parameters)) == "enabled"
    assert callable(torch.cuda.memory._snapshot)


def shards_of_any_tiling_form_a_tensor_of_torch() -> None:
    from torch.distributed._shard.metadata import ShardMetadata
    from torch.distributed._shard.sharded_tensor.api import ShardedTensor
    from torch.distributed._shard.sharded_tensor.metadata import ShardedTensorMetadata, TensorProperties
    from torch.distributed._shard.sharded_tensor.shard import Shard
    from torch.distributed._shard.sharding_spec.api import EnumerableShardingSpec

    places = [((0, 0), (1, 4)), ((1, 0), (2, 1)), ((1, 1), (2, 3))]
    found = [ShardMetadata(shard_offsets=list(o), shard_sizes=list(s), placement="rank:0/cpu") for o, s in places]
    assert EnumerableShardingSpec(found).shards == found
    local = [Shard(torch.rand(*place.shard_sizes), place) for place in found]
    properties = TensorProperties(dtype=torch.float32, requires_grad=False)
    whole = ShardedTensor._init_from_local_shards_and_global_metadata(
        local, ShardedTensorMetadata(shards_metadata=found, size=torch.Size([3, 4]), tensor_properties=properties)
    )
    assert whole.size() == torch.Size([3, 4])
    assert [s.tensor.data_ptr() for s in whole.local_shards()] == [s.tensor.data_ptr() for s in local]


def a_wrapper_holds_several_shards() -> None:
    from torch.distributed.tensor._shards_wrapper import LocalShardsWrapper

    tensors = [torch.arange(6.0).view(3, 2), torch.arange(3.0).view(3, 1)]
    wrapper = LocalShardsWrapper(tensors, [(0, 2), (0, 7)])
    assert wrapper.local_shards()[1].data_ptr() == tensors[1].data_ptr()
    assert [tuple(offset) for offset in wrapper.local_offsets()] == [(0, 2), (0, 7)]
    empty = LocalShardsWrapper([], [])
    assert empty.local_shards() == []
    assert [tuple(chunk.sizes) for chunk in empty.storage_metadata().chunks] == [(0, 0)]
    empty.storage_metadata().chunks.clear()
    assert empty.local_offsets() == []


def a_place_in_a_file_has_three_fields() -> None:
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    place = _StorageInfo("name", 5, 7)
    assert (place.relative_path, place.offset, place.length) == ("name", 5, 7)


def a_class_is_a_node_of_fx() -> None:
    from torch.fx import _symbolic_trace
    from torch.fx._pytree import register_pytree_flatten_spec, tree_flatten_spec
    from torch.utils import _pytree

    tracing: list[bool] = []

    class Pair(metaclass=_symbolic_trace.ProxyableClassMeta):
        def __init__(self, x: Any, y: Any) -> None:
            self.x, self.y = x, y

    def made(x: Any, y: Any) -> Any:
        tracing.append(_symbolic_trace.is_fx_symbolic_tracing())
        return Pair(x, y)

    graph = torch.fx.symbolic_trace(made).graph
    assert tracing == [True]
    assert not _symbolic_trace.is_fx_symbolic_tracing()
    assert [node.target for node in graph.nodes if node.op == "call_function"] == [Pair]

    def flatten(pair: Any) -> tuple[list[Any], None]:
        return [pair.x, pair.y], None

    _pytree.register_pytree_node(
        Pair,
        flatten,
        lambda leaves, _: Pair(*leaves),
        flatten_with_keys_fn=lambda p: ([(_pytree.GetAttrKey("x"), p.x), (_pytree.GetAttrKey("y"), p.y)], None),
        serialized_type_name="tests.Pair",
    )
    register_pytree_flatten_spec(Pair, lambda pair, _: flatten(pair)[0])
    leaves, spec = _pytree.tree_flatten([Pair(1, 2), 3])
    assert leaves == [1, 2, 3]
    assert _pytree.tree_unflatten([4, 5, 6], spec)[0].y == 5
    assert _pytree.tree_map(lambda leaf: leaf + 1, Pair(1, 2)).x == 2
    assert tree_flatten_spec(Pair(1, 2), _pytree.tree_flatten(Pair(0, 0))[1]) == [1, 2]
    assert _pytree.GetAttrKey("x").get(Pair(1, 2)) == 1
    assert hasattr(_pytree.KeyEntry, "get")


def losses_have_one_base() -> None:
    from torch.nn.modules.loss import _Loss

    assert isinstance(torch.nn.MSELoss(), _Loss)
    assert isinstance(torch.nn.BCEWithLogitsLoss(), _Loss)


def a_module_keeps_its_parts_in_dicts() -> None:
    seen = []

    class Loading(torch.nn.Linear):
        def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
            seen.append((prefix, sorted(state_dict)))
            super()._load_from_state_dict(state_dict, prefix, *args)

        def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
            super()._save_to_state_dict(destination, prefix, keep_vars)
            destination[f"{prefix}more"] = torch.zeros(1)

        def _apply(self, fn: Any, recurse: bool = True) -> Any:
            seen.append(("applied", []))
            return super()._apply(fn, recurse)

    parent = torch.nn.Sequential(Loading(1, 1))
    parent.load_state_dict({"0.weight": torch.full((1, 1), 7.0), "0.bias": torch.zeros(1)})
    assert seen == [("0.", ["0.bias", "0.weight"])]
    assert parent[0].weight.item() == 7
    assert sorted(parent.state_dict()) == ["0.bias", "0.more", "0.weight"]
    assert parent.double()[0].weight.dtype == torch.float64
    assert seen[1:] == [("applied", [])]
    kept = dict(parent._modules)
    parent._modules.clear()
    assert list(parent.children()) == []
    parent._modules.update(kept)
    assert parent[0].weight.item() == 7


def operators_are_seen_with_their_schemas() -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    seen = []

    class Watching(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func)
            return func(*args, **(kwargs or {}))

    with Watching():
        torch.zeros(2).add_(1).add(1).view(2, 1)
    kinds = {str(func): func._schema for func in seen}
    assert kinds["aten.add_.Tensor"].is_mutable
    assert not kinds["aten.add.Tensor"].is_mutable
    assert [value.alias_info is None for value in kinds["aten.add.Tensor"].returns] == [True]
    assert [value.alias_info is None for value in kinds["aten.view.default"].returns] == [False]
    assert "device" in [argument.name for argument in kinds["aten.zeros.default"].arguments]


def torch_marks_parameters_with_optimizers_in_backward() -> None:
    from torch.distributed.optim import _apply_optimizer_in_backward

    parameter = torch.nn.Parameter(torch.ones(1))
    _apply_optimizer_in_backward(torch.optim.SGD, [parameter], {"lr": 0.5})
    assert parameter._optimizer_classes == [torch.optim.SGD]  # type: ignore[attr-defined]
    assert [type(optimizer) for optimizer in parameter._in_backward_optimizers] == [torch.optim.SGD]  # type: ignore[attr-defined]


def a_marked_function_is_not_inlined() -> None:
    graphs = []

    def eager(x: torch.Tensor) -> torch.Tensor:
        return x.cos()

    eager._torchdynamo_disable = True  # type: ignore[attr-defined]

    def backend(module: Any, _: Any) -> Any:
        graphs.append(module.code)
        return module.forward

    compiled = torch.compile(lambda x: eager(x.sin()) + 1, backend=backend)
    x = torch.rand(3)
    torch.testing.assert_close(compiled(x), x.sin().cos() + 1)
    assert ["sin" in code for code in graphs].count(True) == 1
    assert not [code for code in graphs if "sin" in code and "cos" in code]


def the_profilers_state_is_a_flag() -> None:
    assert torch.autograd.profiler._is_profiler_enabled is False
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        assert torch.autograd.profiler._is_profiler_enabled is True


def a_protocol_has_a_mark() -> None:
    class Sized(Protocol):
        size: int

    assert Sized._is_protocol  # type: ignore[attr-defined]
    assert not getattr(dict, "_is_protocol", False)


def numbas_machine_code_is_loaded_without_numba() -> None:
    from llvmlite import ir
    from numba import njit, types
    from numba.core import cgutils
    from numba.extending import intrinsic

    from recshard_lab.embedding.kernels.numba.compiled import _load

    @intrinsic
    def total(context: Any, limit: Any) -> Any:
        def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            word = ir.IntType(64)
            out = cgutils.alloca_once(builder, word)
            builder.store(ir.Constant(word, 0), out)
            with cgutils.for_range_slice(builder, ir.Constant(word, 0), args[0], ir.Constant(word, 2), inc=True) as (
                i,
                _,
            ):
                builder.store(builder.add(builder.load(out), i), out)
            return builder.load(out)

        return types.int64(types.int64), code

    function = njit("int64(int64)", no_cpython_wrapper=True, no_cfunc_wrapper=True)(lambda n: total(n))
    (compiled,) = function.overloads.values()
    symbol, code = compiled.fndesc.llvm_func_name, compiled.library._get_compiled_object()
    result, error = ctypes.c_int64(), ctypes.c_void_p()
    call = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)(_load(symbol, code))
    assert call(ctypes.addressof(result), ctypes.addressof(error), 7) == 0
    assert result.value == 0 + 2 + 4 + 6


def a_shell_shows_what_an_error_renders_and_numbers_its_cells() -> None:
    from contextlib import redirect_stdout

    from IPython.core.interactiveshell import InteractiveShell

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


def a_comm_has_a_route_that_may_be_absent() -> None:
    """`tests/browser/test_running_cells.py` sees widgets answer in a real kernel."""
    import ipykernel.kernelbase
    from ipykernel.comm.comm import BaseComm

    assert 'getattr(comm, "_reply_subshell_for", None)' in inspect.getsource(ipykernel.kernelbase)
    assert callable(BaseComm._reply_subshell_for)


def exit_handlers_run_once() -> None:
    code = "import atexit; atexit.register(print, 'once'); atexit._run_exitfuncs()"
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "once\n"


def a_process_starts_without_the_notebooks_main_module() -> None:
    from recshard_lab.launcher.engines.spawn import _Process

    read, write = os.pipe()
    from multiprocess.connection import Connection

    code = "import os, sys; os.write(out.fileno(), repr([*vars(sys.modules['__main__'])]).encode()); os._exit(7)"
    process = _Process(target=exec, args=(code, {"out": Connection(write, readable=False)}))
    process.start()
    process.join()
    assert process.exitcode == 7
    assert "__mp_main__" not in os.read(read, 9999).decode()
    os.close(read)


def backward_has_a_number() -> None:
    class Seen(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            numbers.append(torch._C._current_graph_task_id())
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            numbers.append(torch._C._current_graph_task_id())
            return grad

    numbers: list[int] = []
    Seen.apply(torch.ones(1, requires_grad=True)).sum().backward()
    assert numbers[0] == -1
    assert numbers[1] >= 0


USES: dict[Callable[[], None], list[str]] = {
    backward_has_a_number: ["torch._C._current_graph_task_id"],
    backends_are_replaced_inside_a_group: [
        "._ZN4c10d12ProcessGroup17release_resourcesEv",
        "._ZTVN4c10d12ProcessGroupE",
        "._get_backend",
        "._get_sequence_number_for_group",
        "._register_backend",
        "._set_group_name",
        "torch.distributed.distributed_c10d._world",
    ],
    a_backend_shares_the_devices_of_another: [
        "._devices",
        "._timeout",
        "torch.distributed.ProcessGroupGloo._Options",
    ],
    a_group_is_made_by_its_members_alone: [
        "torch.distributed.distributed_c10d._get_default_store",
        "torch.distributed.distributed_c10d._get_default_timeout",
        "torch.distributed.distributed_c10d._new_process_group_helper",
    ],
    stores_are_served_on_a_socket_that_listens: ["torch._C._distributed_c10d"],
    collectives_are_recorded_with_their_lines: ["._dump_fr_trace", "._dump_nccl_trace"],
    collectives_are_wrapped_by_a_file_of_torch: ["torch.distributed.c10d_logger"],
    the_main_module_of_functions_is_the_ranks: ["dill._dill._main_module"],
    the_deterministic_mode_is_set_without_dynamo: [
        "torch._C._get_deterministic_fill_uninitialized_memory",
        "torch._C._set_deterministic_algorithms",
        "torch._C._set_deterministic_fill_uninitialized_memory",
    ],
    an_assertion_names_its_message: ["torch._assert_async"],
    a_storage_has_an_identity: ["._cdata"],
    a_traced_program_takes_sizes_0_and_1_and_parts_of_unknown_length: [
        "torch._check",
        "torch.fx.experimental._config",
    ],
    programs_are_compiled_into_packages: ["torch._inductor"],
    a_module_lists_its_forward_hooks: ["._forward_hooks", "._forward_pre_hooks"],
    lists_of_tensors_are_added: ["torch._foreach_add"],
    a_callback_runs_at_the_end_of_backward: ["torch.autograd.Variable._execution_engine"],
    ddp_lists_its_buckets_and_parameters: [
        "._get_local_used_map",
        "._get_zeros_like_grad_buckets",
        "torch.nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model",
        "torch.nn.parallel.DistributedDataParallel._post_forward",
    ],
    per_sample_weights_have_the_formula_of_embedding_bag: ["torch.ops.aten._embedding_bag_per_sample_weights_backward"],
    visible_devices_are_read_as_cuda_does: ["torch.cuda._parse_visible_devices", "torch.cuda._raw_device_uuid_nvml"],
    allocations_of_cuda_are_recorded: ["torch.cuda.memory._record_memory_history", "torch.cuda.memory._snapshot"],
    shards_of_any_tiling_form_a_tensor_of_torch: [
        "torch.distributed._shard",
        "torch.distributed._shard.sharded_tensor.api.ShardedTensor._init_from_local_shards_and_global_metadata",
    ],
    a_wrapper_holds_several_shards: ["torch.distributed.tensor._shards_wrapper"],
    a_place_in_a_file_has_three_fields: ["torch.distributed.checkpoint.filesystem._StorageInfo"],
    a_class_is_a_node_of_fx: ["torch.fx._pytree", "torch.fx._symbolic_trace", "torch.utils._pytree"],
    losses_have_one_base: ["torch.nn.modules.loss._Loss"],
    a_module_keeps_its_parts_in_dicts: [
        "torch.nn.Module._apply",
        "torch.nn.Module._save_to_state_dict",
        "._modules",
        "torch.nn.Module._load_from_state_dict",
    ],
    operators_are_seen_with_their_schemas: ["._schema", "torch.utils._python_dispatch"],
    torch_marks_parameters_with_optimizers_in_backward: ["._in_backward_optimizers", "._optimizer_classes"],
    a_marked_function_is_not_inlined: ["._torchdynamo_disable"],
    the_profilers_state_is_a_flag: ["._is_profiler_enabled"],
    a_protocol_has_a_mark: ["._is_protocol"],
    numbas_machine_code_is_loaded_without_numba: ["._get_compiled_object", "numba.core.cgutils"],
    a_shell_shows_what_an_error_renders_and_numbers_its_cells: ["._filename_map", "._reloader", "._render_traceback_"],
    a_comm_has_a_route_that_may_be_absent: ["._reply_subshell_for"],
    exit_handlers_run_once: ["._run_exitfuncs"],
    a_process_starts_without_the_notebooks_main_module: [
        "multiprocess.resource_tracker",
        "multiprocess.spawn",
        "multiprocess.util",
        "multiprocess.popen_spawn_posix.Popen._launch",
        "multiprocess.context.SpawnProcess._Popen",
    ],
}


@pytest.fixture(scope="module")
def one() -> Iterator[Ranks]:
    """A rank whose torch the tests may change."""
    with launch(1) as ranks:
        yield ranks


@pytest.mark.gate
@pytest.mark.parametrize("must", [pytest.param(must, id=must.__name__) for must in USES])
def test_private_parts_do_what_the_library_needs(one: Ranks, must: Callable[[], None]) -> None:
    one.run(must)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_an_allocation_on_a_gpu_is_recorded() -> None:
    torch.cuda.memory._record_memory_history("all")
    kept = torch.zeros(1 << 20, device="cuda")
    snapshot = torch.cuda.memory._snapshot()
    torch.cuda.memory._record_memory_history(None)
    assert any(segment["total_size"] >= kept.numel() * 4 for segment in snapshot["segments"])
    assert any(entry["action"] == "alloc" for trace in snapshot["device_traces"] for entry in trace)


@pytest.mark.gate
def test_every_private_use_of_another_package_is_in_the_table() -> None:
    listed = {name for names in USES.values() for name in names}
    found = private_uses()
    missing = {name: sorted(files) for name, files in found.items() if name not in listed}
    assert missing == {}, "write a test of what they must do, and add them to USES"
    assert sorted(listed - set(found)) == [], "no longer used: take them out of USES"


def test_packages_with_private_uses_have_an_upper_bound() -> None:
    project = tomllib.loads(PACKAGE.with_name("pyproject.toml").read_text())["project"]
    required = [
        *project["dependencies"],
        *(line for lines in project["optional-dependencies"].values() for line in lines),
    ]
    for package in ("torch", "dill", "multiprocess", "ipykernel", "ipython", "numba"):  # numba requires one llvmlite
        bounds = [line for line in required if re.match(rf"{package}[<>=]", line)]
        assert bounds, package
        assert [line for line in bounds if "<" not in line and "==" not in line] == []
