"""What `launch` decides: devices on machines with 0 to 8 GPUs, slices and hidden GPUs; Ray's machines; nodes."""

import ctypes
import os
import re
import subprocess
import sys
import warnings
from collections.abc import Callable
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist

from recshard_lab import DistributedModelParallel, EmbeddingBagCollection, EmbeddingBagConfig, launcher
from recshard_lab.comm import InterNodeLink, ShardingEnv, collectives, compute_device, host_env, message_device
from recshard_lab.launcher import LaunchError, Ranks, devices, join, joining, launch
from recshard_lab.launcher.devices import mig_slices, visible_gpus
from recshard_lab.launcher.engines import fork
from recshard_lab.launcher.engines.ray_cluster import layout
from recshard_lab.launcher.shape import Shape
from recshard_lab.launcher.wires import rank_spec
from recshard_lab.sharding import running_topology
from tests.launched import launched
from tests.refusals import not_refused

NOTE = "shared GPU: bytes and results are real, times are not"
GPUS, RANKS = (0, 1, 2, 3, 8), (1, 2, 3, 4, 8)
UUIDS = [f"GPU-{index:08x}-aaaa" for index in range(8)]

Machine = Callable[..., None]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    """Makes this a machine with so many GPUs, as NVML counts them. Starting CUDA fails the test."""

    def refuse(*_: Any) -> int:
        raise AssertionError("counting GPUs started CUDA")

    def build(gpus: int, visible: str | None = None, slices: dict[int, list[str]] | None = None) -> None:
        monkeypatch.setattr(devices, "mig_slices", lambda: slices or {})
        monkeypatch.setattr(torch.cuda, "_is_compiled", lambda: True)
        monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
        monkeypatch.setattr(torch.cuda, "_raw_device_count_nvml", lambda: gpus)
        monkeypatch.setattr(torch.cuda, "_raw_device_uuid_nvml", lambda: UUIDS[:gpus])
        monkeypatch.setattr(torch._C, "_cuda_getDeviceCount", refuse, raising=False)
        monkeypatch.setattr(torch.cuda, "_lazy_init", refuse)
        monkeypatch.setattr("recshard_lab.launcher.shape.usable_cores", lambda: 8)
        if visible is None:
            monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        else:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)

    return build


def outcome(ranks: int, **asked: Any) -> tuple[str, tuple[str, ...], bool] | None:
    """Backend, devices and whether a notice names unused GPUs; None if it is refused."""
    try:
        shape = Shape.checked(ranks, **asked)
    except LaunchError:
        return None
    return shape.backend, shape.devices, bool(shape.unused_gpus)


def expected(gpus: int, ranks: int, backend: str | None, share: bool) -> tuple[str, tuple[str, ...], bool] | None:
    """The rule, written again: whole GPUs if there are enough, and never a silent change of what was requested."""
    if backend == "gloo" and not share:
        return "gloo", ("cpu",) * ranks, False
    if share and not gpus:
        return None
    if ranks <= gpus:
        return backend or "nccl", tuple(f"cuda:{rank}" for rank in range(ranks)), False
    if backend == "nccl":
        return None
    if share:
        return "gloo", tuple(f"cuda:{rank * gpus // ranks}" for rank in range(ranks)), False
    return "gloo", ("cpu",) * ranks, gpus > 0


@pytest.mark.parametrize("gpus", GPUS)
def test_every_machine_backend_and_number_of_ranks_has_the_stated_result(gpus: int, machine: Machine) -> None:
    machine(gpus)
    for ranks, backend, share in product(RANKS, (None, "gloo", "nccl"), (False, True)):
        found = outcome(ranks, backend=backend, share_gpu=share)
        assert found == expected(gpus, ranks, backend, share), (ranks, backend, share)
        if found is not None:
            shape = Shape.checked(ranks, backend=backend, share_gpu=share)
            assert shape.share_gpu is (found[1][0] != "cpu" and ranks > gpus)
            assert shape.times_note == (NOTE if shape.share_gpu else "")
            lines = [line for line in (shape.unused_gpus, shape.times_note) if line]
            assert shape.notice().splitlines()[: len(lines)] == lines
            assert [rank_spec(shape, rank, "store")["device"] for rank in range(ranks)] == list(found[1])


@pytest.mark.parametrize("gpus", GPUS)
def test_the_same_result_where_only_torchs_count_is_known(gpus: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    for ranks in RANKS:
        assert outcome(ranks) == expected(gpus, ranks, None, False)


@pytest.mark.parametrize(
    ("gpus", "visible", "usable"),
    [
        (3, None, ("cuda:0", "cuda:1", "cuda:2")),
        (3, "", ()),
        (3, "0,-1,2", ("cuda:0",)),  # CUDA stops at the first unknown entry
        (3, "2,0", ("cuda:0", "cuda:1")),
        (3, "0,7", ("cuda:0",)),
        (3, "1,1", ()),  # CUDA shows nothing if an entry is repeated
        (3, f"{UUIDS[2]},{UUIDS[0]}", ("cuda:0", "cuda:1")),
        (1, "MIG-aa,MIG-bb", ("MIG-aa", "MIG-bb")),
        (2, "MIG-GPU-77/1/0,MIG-GPU-77/2/0", ("MIG-GPU-77/1/0", "MIG-GPU-77/2/0")),
    ],
)
def test_only_visible_gpus_are_used(gpus: int, visible: str | None, usable: tuple[str, ...], machine: Machine) -> None:
    machine(gpus, visible)
    assert visible_gpus() == usable
    shape = Shape.checked(1)
    assert (shape.devices, shape.unused_gpus) == ((usable or ("cpu",))[:1], "")


@pytest.mark.parametrize(
    ("asked", "backend", "placed"),
    [
        ({"n": 2, "devices": [2, 0]}, "nccl", ("cuda:2", "cuda:0")),
        ({"n": 2, "devices": ["cuda:1", torch.device("cuda:0")]}, "nccl", ("cuda:1", "cuda:0")),
        ({"n": 2, "devices": [UUIDS[1], UUIDS[2]]}, "nccl", ("cuda:1", "cuda:2")),
        ({"n": 1, "devices": ["GPU-00000002"]}, "nccl", ("cuda:2",)),  # CUDA takes a unique beginning as well
        ({"n": 4, "devices": [2, 1], "share_gpu": True}, "gloo", ("cuda:2", "cuda:2", "cuda:1", "cuda:1")),
        ({"n": 2, "devices": [0, 1], "backend": "gloo"}, "gloo", ("cuda:0", "cuda:1")),
        ({"n": 2, "devices": torch.device("cpu"), "backend": "gloo"}, "gloo", ("cpu", "cpu")),
    ],
)
def test_devices_are_named_by_index_or_uuid(
    asked: dict[str, Any], backend: str, placed: tuple[str, ...], machine: Machine
) -> None:
    machine(3)
    asked = dict(asked)
    shape = Shape.checked(asked.pop("n"), asked.pop("nodes", 1), **asked)
    assert (shape.backend, shape.devices, shape.unused_gpus) == (backend, placed, "")


NOT_LAUNCHED: list[tuple[dict[str, Any], str]] = [
    ({"n": 0}, r"n=0\).*at least 1"),
    ({"n": True}, "whole number"),
    ({"n": 4, "nodes": 3}, r"do not divide evenly.*nodes=2, or n=6"),
    ({"n": 1000}, r"more ranks than this machine.*Fix: n="),
    ({"n": 2, "devices": [0, 5]}, r"5 does not exist: this machine has 2 GPUs visible: .*Fix: devices=\[0, 1\]"),
    ({"n": 1, "devices": ["GPU-0000000"]}, "'GPU-0000000' does not exist"),  # the beginning of both
    ({"n": 2, "devices": [-1, 0]}, "-1 does not exist"),
    ({"n": 2, "devices": [1, UUIDS[1]]}, f"'{UUIDS[1]}' names a GPU that is listed already.*pass share_gpu=True"),
    ({"n": 2, "devices": [0]}, "2 ranks and 1 GPU. Fix: share_gpu=True, or n=1"),
    ({"n": 1, "devices": [0, 1]}, r"2 GPUs for 1 rank. Fix: devices=\[0\], or n=2"),
    ({"n": 2, "devices": [0], "backend": "nccl"}, "needs one GPU per rank, and devices names 1 GPU.*n=1"),
    ({"devices": []}, "the list names no GPU. Fix: leave out devices, or devices='cpu'"),
    ({"devices": 0}, r"devices=0\): expected a list of GPUs"),
    ({"devices": "cuda:0"}, "'cuda:0'.*expected a list of GPUs"),
    ({"devices": [True]}, "True is not a GPU. Expected an index such as 0"),
    ({"devices": "mps"}, "MPS .*is not supported.*Fix: devices='cpu'"),
    ({"devices": [torch.device("mps:0")]}, "MPS .*is not supported.*Fix: devices='cpu'"),
    ({"devices": "cpu", "backend": "nccl"}, "'nccl' needs a GPU. Fix: leave out backend"),
    ({"devices": "cpu", "share_gpu": True}, "share_gpu=True needs a GPU. Fix: leave out share_gpu"),
    ({"share_gpu": "yes"}, "'yes'.*expected True or False"),
    ({"n": 4, "backend": "nccl", "share_gpu": True}, "one GPU per rank, and this machine has 2 GPUs.*or n=2"),
    ({"backend": "mpi"}, "'mpi'.*expected 'gloo', 'nccl' or None"),
    ({"memory_gb": 0}, "memory_gb=0.*expected a number above 0"),
    ({"memory_gb": True}, "memory_gb=True"),
    ({"seed": True}, "seed=True.*whole number of at least 0"),
    ({"seed": -1}, "seed=-1"),
    ({"start_method": "forkserver"}, "'fork', 'spawn' or None"),
    ({"engine": "dask"}, "'local', 'ray' or None"),
    ({"address": "auto"}, "address='auto'.*only engine='ray' has an address"),
    ({"engine": "ray", "start_method": "fork"}, "leave out start_method"),
    ({"engine": "ray", "backend": "mpi"}, "'gloo', 'nccl' or None"),
    ({"engine": "ray", "share_gpu": True}, "Ray assigns whole GPUs to ranks. Fix: leave out share_gpu"),
    ({"engine": "ray", "devices": [0]}, "Fix: leave out devices"),
    ({"inter_node_latency_ms": 5.0}, "inter_node_latency_ms=5.0, nodes=1.*Fix: nodes=2"),
    ({"n": 2, "nodes": 2, "inter_node_latency_ms": -1.0}, "inter_node_latency_ms=-1.0.*at least 0"),
    ({"n": 2, "nodes": 2, "inter_node_gbps": 0}, "inter_node_gbps=0.*expected a number above 0"),
    ({"n": 2, "nodes": 2, "inter_node_gbps": float("nan")}, "gbps=nan.*expected a number"),
]


def test_what_cannot_be_launched_is_refused_with_a_fix(machine: Machine) -> None:
    machine(2)
    calls = [(lambda asked=asked: launch(**{"n": 1, **asked}), words) for asked, words in NOT_LAUNCHED]
    assert not_refused(calls, LaunchError) == []
    assert launcher.current() is None


def test_uuids_are_found_among_the_visible_gpus_only_whose_variable_stays(machine: Machine) -> None:
    machine(3, "2,0")
    assert Shape.checked(1, devices=[UUIDS[2]]).devices == ("cuda:0",)
    with pytest.raises(LaunchError, match=f"{UUIDS[1]}' does not exist: this machine has 2 GPUs visible"):
        Shape.checked(1, devices=[UUIDS[1]])
    spec = rank_spec(Shape.checked(2), 1, "store")
    assert spec["environment"]["CUDA_VISIBLE_DEVICES"] == "2,0"
    assert spec["device"] == spec["environment"]["RECSHARD_DEVICE"] == "cuda:1"
    # with a slice, torch counts GPUs by starting CUDA, which does not work in a fork afterwards
    assert "CUDA_VISIBLE_DEVICES" not in fork.environment({"CUDA_VISIBLE_DEVICES": "MIG-aa,MIG-bb"})
    assert fork.environment({"CUDA_VISIBLE_DEVICES": "1"})["CUDA_VISIBLE_DEVICES"] == "1"
    machine(3, f"{UUIDS[1]},GPU-00000000")
    assert Shape.checked(2, devices=[UUIDS[0], UUIDS[1]]).devices == ("cuda:1", "cuda:0")


def in_a_cell(shape: Shape) -> str:
    """A shape as the table of docs/howto/gpus.md has it."""
    warning = ", warning" if shape.unused_gpus else ""
    if shape.devices[0] == "cpu":
        return f"CPU{warning}"
    per_gpu = shape.world_size // len(set(shape.devices))
    return "NCCL" if shape.backend == "nccl" else f"Gloo, {per_gpu} ranks per GPU"


def test_the_table_of_the_docs_is_what_launch_decides(machine: Machine) -> None:
    page = (Path(__file__).parents[2] / "docs/howto/gpus.md").read_text()
    section = page.partition("## Which device a rank gets\n")[2].partition("\n## ")[0]
    header, *rows = re.findall(r"^\| (call|`launch\(.*\)`) \| (.*) \|$", section, re.MULTILINE)
    machines = [int(cell.split()[0]) for cell in header[1].split(" | ")]
    assert machines == [0, 1, 2, 8]
    assert len(rows) == 9
    for call, cells in rows:
        for gpus, cell in zip(machines, cells.split(" | "), strict=True):
            machine(gpus)
            try:
                found = in_a_cell(eval(call.strip("`"), {"launch": Shape.checked}))
            except LaunchError:
                found = "error"
            assert found == cell, (call, gpus)


# -- slices of a GPU


def test_each_rank_sees_its_own_slice_and_slices_count_as_one_gpu(machine: Machine) -> None:
    machine(1, "MIG-aa,MIG-bb")
    shape = Shape.checked(2, share_gpu=True)
    assert (shape.backend, shape.devices, shape.times_note) == ("gloo", ("MIG-aa", "MIG-bb"), NOTE)
    specs = [rank_spec(shape, rank, "store") for rank in range(2)]
    assert [spec["environment"]["CUDA_VISIBLE_DEVICES"] for spec in specs] == ["MIG-aa", "MIG-bb"]
    assert [spec["device"] for spec in specs] == ["cuda:0", "cuda:0"]
    assert Shape.checked(4, share_gpu=True).devices == ("MIG-aa", "MIG-aa", "MIG-bb", "MIG-bb")
    alone = Shape.checked(1)
    assert (alone.backend, alone.devices, alone.times_note) == ("nccl", ("MIG-aa",), "")
    assert "this machine has 2 MIG slices, which count as one GPU. To compute" in Shape.checked(2).unused_gpus
    with pytest.raises(LaunchError, match=r"2 ranks and 2 MIG slices, which count as one GPU\..*share_gpu=True"):
        Shape.checked(2, devices=["MIG-aa", "MIG-bb"])
    assert Shape.checked(1, devices=["MIG-bb"]).devices == ("MIG-bb",)


def test_gpus_in_mig_mode_are_their_slices(machine: Machine) -> None:
    slices = {0: ["MIG-a", "MIG-b"], 1: ["MIG-c"]}
    machine(2, slices=slices)
    assert visible_gpus() == ("MIG-a", "MIG-b", "MIG-c")
    machine(2, "1", slices=slices)
    assert visible_gpus() == ("MIG-c",)
    machine(2, "", slices=slices)
    assert visible_gpus() == ()
    machine(2, slices={0: ["MIG-a"]})  # GPU 1 is whole
    assert visible_gpus() == ("cuda:0", "cuda:1")


class Nvml:
    """NVML of three GPUs: a whole one, one with slices 0 and 2, and one in MIG mode without a slice."""

    slices: ClassVar[dict[int, dict[int, bytes]]] = {1: {0: b"MIG-aa", 2: b"MIG-bb"}, 2: {}}

    def nvmlInit_v2(self) -> int:
        return 0

    def nvmlDeviceGetCount_v2(self, count: Any) -> int:
        count._obj.value = 3
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, gpu: int, card: Any) -> int:
        card._obj.value = 100 + gpu
        return 0

    def nvmlDeviceGetMigMode(self, card: Any, enabled: Any, pending: Any) -> int:
        enabled._obj.value = int(card.value - 100 in self.slices)
        return 0

    def nvmlDeviceGetMaxMigDeviceCount(self, card: Any, most: Any) -> int:
        most._obj.value = 7
        return 0

    def nvmlDeviceGetMigDeviceHandleByIndex(self, card: Any, index: int, one: Any) -> int:
        one._obj.value = 1000 * card.value + index
        return 0 if index in self.slices[card.value - 100] else 6

    def nvmlDeviceGetUUID(self, one: Any, text: Any, size: int) -> int:
        text.value = self.slices[one.value // 1000 - 100][one.value % 1000]
        return 0


def test_slices_are_listed_by_nvml(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: Nvml())
    assert mig_slices() == {1: ["MIG-aa", "MIG-bb"], 2: []}
    monkeypatch.setattr(Nvml, "nvmlDeviceGetMigMode", lambda *_: 3)  # not supported
    assert mig_slices() == {}

    def missing(name: str) -> None:
        raise OSError(name)

    monkeypatch.setattr(ctypes, "CDLL", missing)
    assert mig_slices() == {}


# -- real ranks on the CPU


def exchange() -> list[float]:
    """Sums of what every collective of the library returns for tensors on this rank's device."""
    env = ShardingEnv.default()
    device = compute_device(env)
    assert message_device(env).type == "cpu"
    assert host_env(env) is env
    rank, size = env.rank, env.world_size
    rows = torch.full((size * 4,), float(rank + 1), device=device)
    uneven = torch.full((sum(range(1, size + 1)),), float(rank + 1), device=device, dtype=torch.bfloat16)
    results = [
        collectives.issue_all_to_all(uneven, range(1, size + 1), [rank + 1] * size, env, "test").wait(),
        collectives.issue_reduce_scatter(rows, env, "test").wait(),
        collectives.issue_all_gather(rows, env, "test").wait(),
        collectives.all_reduce(rows, env, "test"),
        collectives.broadcast(torch.full((2,), float(rank + 5), device=device), env, "test", source=1),
    ]
    assert {result.device for result in results} == {device}
    assert collectives.all_gather_object(rank, env) == list(range(size))
    return [float(result.float().sum()) for result in results]


EXCHANGED = [[3.0, 12.0, 24.0, 24.0, 12.0], [6.0, 12.0, 24.0, 24.0, 12.0]]


on_cpu = launched(2, devices="cpu")


def test_ranks_name_their_devices(on_cpu: Ranks) -> None:
    assert on_cpu.devices == [torch.device("cpu")] * 2
    assert on_cpu.pull("device") == on_cpu.devices
    assert on_cpu.times_note == ""
    assert [row.device for row in on_cpu.status()] == ["cpu", "cpu"]
    assert on_cpu.run(lambda: os.environ["RECSHARD_DEVICE"]) == ["cpu", "cpu"]


def test_every_collective_works_on_the_device_of_the_ranks(on_cpu: Ranks) -> None:
    assert on_cpu.run(exchange) == EXCHANGED


def test_the_planner_plans_for_the_devices_of_the_ranks(on_cpu: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    def planned() -> str:
        torch.cuda.device_count = lambda: 1  # a GPU that these two ranks leave unused
        return running_topology().compute_device

    assert on_cpu.run(planned) == ["cpu", "cpu"]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert running_topology().compute_device == "cuda"
    monkeypatch.setenv("RECSHARD_DEVICE", "cuda:0")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert running_topology().compute_device == "cuda"


def test_equal_requests_find_the_running_ranks(on_cpu: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    with launch(2, backend="gloo") as again:
        assert again is on_cpu
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with warnings.catch_warnings(), launch(2) as again:  # the ranks are not new: no warning
        warnings.simplefilter("error")
        assert again is on_cpu
    with pytest.raises(LaunchError, match=r"requested 2 ranks over gloo on cuda:0, cuda:0, but 2 ranks over gloo are"):
        launch(2, share_gpu=True)


def test_a_launch_that_leaves_a_gpu_unused_warns_at_the_callers_line(monkeypatch: pytest.MonkeyPatch) -> None:
    if (running := launcher.current()) is not None:
        running.stop()
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.warns(
        RuntimeWarning, match=r"2 ranks on the CPU.*has 1 GPU\. To compute on a GPU, pass n=1 or"
    ) as caught:
        ranks = launch(2)
    with ranks:
        assert ranks.run(os.getpid) == ranks.pids
        assert ranks.devices == [torch.device("cpu")] * 2
    assert [os.path.basename(each.filename) for each in caught] == [os.path.basename(__file__)]


# -- processes that were started by torchrun or alone


@pytest.mark.parametrize(
    ("gpus", "asked", "result"),
    [
        (0, {}, ("gloo", "cpu", "")),
        (1, {"share_gpu": True}, ("gloo", "cuda:0", NOTE)),
        (2, {}, ("cpu:gloo,cuda:nccl", "cuda:1", "")),
        (2, {"backend": "gloo"}, ("gloo", "cpu", "")),
        (1, {}, ("gloo", "cpu", "")),
        (3, {"devices": [2, 0]}, ("cpu:gloo,cuda:nccl", "cuda:0", "")),
        (1, {"backend": "nccl"}, r"LOCAL_WORLD_SIZE=2, backend='nccl'.*this node has 1 GPU.*or LOCAL_WORLD_SIZE=1"),
        (0, {"share_gpu": True}, "this node has no GPU to share"),
    ],
)
def test_join_decides_as_launch_does(
    gpus: int, asked: dict[str, Any], result: Any, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine(gpus)
    ranks = {"RANK": 1, "WORLD_SIZE": 2, "LOCAL_RANK": 1, "LOCAL_WORLD_SIZE": 2}
    for name, value in {**ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 1}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    created = []

    def create(backend: str, **_: Any) -> None:
        created.append((backend, os.environ["RECSHARD_DEVICE"], os.environ["RECSHARD_TIMES_NOTE"]))
        raise InterruptedError

    monkeypatch.setattr(sys.modules["torch.distributed.rendezvous"], "rendezvous", lambda method: iter([(None, 1, 2)]))
    monkeypatch.setattr(joining, "network", lambda *_: ({}, {}))
    monkeypatch.setattr(dist, "init_process_group", create)
    before = dict(os.environ)
    if isinstance(result, str):
        with pytest.raises(LaunchError, match=result), join(**asked):
            pass
    else:
        with pytest.raises(InterruptedError), join(**asked):
            pass
        assert created == [result]
    assert dict(os.environ) == before
    if (gpus, asked) == (1, {}):  # one rank of a node warns
        monkeypatch.setenv("LOCAL_RANK", "0")
        with pytest.raises(RuntimeWarning, match=r"2 ranks on the CPU over Gloo: .* this node has 1 GPU\."), join():
            pass


def test_mps_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    table = EmbeddingBagConfig(4, 4, name="t", feature_names=["f"])
    with pytest.raises(
        ValueError, match=r"device='mps': MPS \(Apple's GPU\) is not supported: .*Fix: pass device='cpu'"
    ):
        DistributedModelParallel(EmbeddingBagCollection([table]), device="mps")
    model = EmbeddingBagCollection([table])
    there = SimpleNamespace(device=torch.device("mps", 0))
    monkeypatch.setattr(model, "parameters", lambda recurse=True: iter([there]))
    with pytest.raises(ValueError, match=r"a parameter of the module is on MPS: .*Fix: pass module.to\('cpu'\)"):
        DistributedModelParallel(model)


# -- real ranks on a GPU

needs_gpu = pytest.mark.skipif(torch.cuda.device_count() == 0, reason="no NVIDIA GPU on this machine")


@pytest.mark.cuda
@needs_gpu
def test_ranks_that_share_a_gpu_exchange_its_tensors_over_gloo() -> None:
    with launch(2, share_gpu=True, devices=[0]) as ranks:
        assert ranks.backend == "gloo"
        assert ranks.devices == ranks.pull("device") == [torch.device("cuda:0")] * 2
        assert ranks.times_note == NOTE
        assert ranks.run(exchange) == EXCHANGED


@pytest.mark.cuda
@needs_gpu
def test_one_rank_on_one_gpu_uses_nccl_and_the_kernel_does_not_start_cuda() -> None:
    code = (
        "import torch; from recshard_lab import launch\n"
        "with launch(1) as ranks:\n"
        "    print(ranks.backend, ranks.devices, ranks.eval('float(torch.ones(2, device=device).sum())'))\n"
        "    print(torch.cuda.is_initialized())\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["nccl [device(type='cuda', index=0)] [2.0]", "False"]


SMALL, LARGE = {"CPU": 8.0}, {"CPU": 16.0, "GPU": 4.0}


def test_without_ray_the_message_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(LaunchError, match=r"pip install 'recshard-lab\[ray\]'"):
        launch(2, engine="ray")


@pytest.mark.parametrize("address", ["127.0.0.1:9", "127.0.0.1:none"])
def test_an_address_where_nobody_listens_is_told_at_once(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(is_initialized=lambda: False))
    with pytest.raises(LaunchError, match=r"no Ray cluster answers there .*ray start --head"):
        launch(2, engine="ray", address=address)


def ray_shape(n: int, nodes: int = 1, backend: str = "gloo", threads: int = 1) -> Shape:
    return Shape(n, nodes, backend, threads, "ray")


@pytest.mark.parametrize(
    ("shape", "machines", "hosts"),
    [
        (ray_shape(8), [SMALL, SMALL], 1),  # as few as hold them
        (ray_shape(16), [SMALL, SMALL, LARGE], 1),
        (ray_shape(8, threads=2), [SMALL, SMALL], 2),
        (ray_shape(18), [SMALL, SMALL, SMALL], 3),
        (ray_shape(4, nodes=2), [SMALL, SMALL], 2),  # machines where there are as many
        (ray_shape(4, nodes=2), [SMALL], 1),  # virtual nodes otherwise
        (ray_shape(8, backend="nccl"), [SMALL, LARGE, LARGE], 2),
    ],
)
def test_ranks_go_in_equal_shares_to_as_few_machines_as_hold_them(
    shape: Shape, machines: list[dict[str, float]], hosts: int
) -> None:
    assert layout(shape, machines) == hosts
    with pytest.raises(LaunchError, match=r"n=17, .*8 CPUs 0 GPUs, 16 CPUs 4 GPUs"):
        layout(ray_shape(17), [SMALL, LARGE])


def test_ranks_know_their_node_and_their_link() -> None:
    names = ("NODE_RANK", "GROUP_RANK", "GROUP_WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "RANK", "WORLD_SIZE")
    with launch(4, nodes=2, inter_node_latency_ms=20, inter_node_gbps=0.1) as ranks:
        assert "4 ranks on 2 virtual nodes (emulated link between them: 20 ms, 0.1 Gbit/s a rank)" in repr(ranks)
        assert "emulated" in ranks.shape.notice()
        assert ranks.run(InterNodeLink.from_environment) == [InterNodeLink(latency_ms=20.0, gbps=0.1)] * 4
        assert [status.node for status in ranks.status()] == [0, 0, 1, 1]
        seen = ranks.run(lambda: [int(os.environ[name]) for name in names])
    assert seen == [[r // 2, r // 2, 2, r % 2, 2, r, 4] for r in range(4)]


def test_a_link_is_only_what_the_launch_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RECSHARD_INTER_NODE_LATENCY_MS", "1000")
    with launch(2, nodes=2) as ranks:
        assert ranks.run(InterNodeLink.from_environment) == [None, None]
        with pytest.raises(LaunchError, match=r"2 virtual nodes \(emulated link between them: 1 ms\) over gloo, but 2"):
            launch(2, nodes=2, inter_node_latency_ms=1)
    assert Shape.checked(2, 2, inter_node_gbps=2.5).link == "emulated link between them: 2.5 Gbit/s a rank"
    assert Shape.checked(2, 2, inter_node_latency_ms=0).variables() == {"RECSHARD_INTER_NODE_LATENCY_MS": "0.0"}
