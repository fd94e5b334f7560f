"""Where each rank computes and over which backend: the decisions of `launch` and `join`, made before CUDA starts.

Nothing here starts CUDA: GPUs are counted through NVML, and ranks start CUDA themselves.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..arguments import MPS
from ..interrupts import uninterrupted
from .errors import LaunchError

if TYPE_CHECKING:
    import torch

__all__ = [
    "DEVICE_VARIABLE",
    "SHARE_VARIABLE",
    "TIMES_NOTE",
    "TIMES_VARIABLE",
    "Choice",
    "checked_backend",
    "choose",
    "rank_variables",
    "shared",
    "shares_by_default",
    "torch_device",
    "visible_gpus",
]

TIMES_NOTE = "shared GPU: bytes and results are real, times are not"
DEVICE_VARIABLE = "RECSHARD_DEVICE"  # a rank's device, as the rank names it; read by `comm.compute_device`
SHARE_VARIABLE = "RECSHARD_SHARE_GPU"  # set by the reader
TIMES_VARIABLE = "RECSHARD_TIMES_NOTE"  # TIMES_NOTE, or empty; read by `comm.times_note`


@dataclass(frozen=True)
class Choice:
    """The backend, the device of each rank, and one line for the reader if ranks leave GPUs unused.

    devices: by rank, "cpu", "cuda:K" (K counts the visible GPUs), or the UUID of a MIG slice ("MIG-...").
    """

    backend: str
    devices: tuple[str, ...]
    notice: str = ""


def visible_gpus() -> tuple[str, ...]:
    """The GPUs that ranks may use, as `CUDA_VISIBLE_DEVICES` leaves them: "cuda:K", or UUIDs of MIG slices.

    A process uses one MIG slice at a time, so slices are named by UUID and each rank is started with its own.
    """
    with uninterrupted():
        import torch

    names = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")]
    if names[0].startswith("MIG-"):
        listed = tuple(name for name in names if name.startswith("MIG-"))
        return listed if torch.backends.cuda.is_built() else ()
    count = torch.cuda.device_count()
    if count and (slices := mig_slices()):  # CUDA shows a process the first slice of all
        shown = [gpu for gpu in torch.cuda._parse_visible_devices()[:count] if isinstance(gpu, int)]
        if shown and all(gpu in slices for gpu in shown):
            return tuple(uuid for gpu in shown for uuid in slices[gpu])
    return tuple(f"cuda:{index}" for index in range(count))


def mig_slices() -> dict[int, list[str]]:
    """GPU -> UUIDs of its slices, for the GPUs in MIG mode, from NVML. Empty without NVML."""
    found: dict[int, list[str]] = {}
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
        enabled, pending, most, count = (ctypes.c_uint() for _ in range(4))
        if nvml.nvmlInit_v2() or nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)):
            return {}
        for gpu in range(count.value):
            card, one, text = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.create_string_buffer(96)
            if nvml.nvmlDeviceGetHandleByIndex_v2(gpu, ctypes.byref(card)):
                continue
            if nvml.nvmlDeviceGetMigMode(card, ctypes.byref(enabled), ctypes.byref(pending)) or not enabled.value:
                continue
            nvml.nvmlDeviceGetMaxMigDeviceCount(card, ctypes.byref(most))
            found[gpu] = []
            for index in range(most.value):
                if nvml.nvmlDeviceGetMigDeviceHandleByIndex(card, index, ctypes.byref(one)):
                    continue  # no slice has this number
                if not nvml.nvmlDeviceGetUUID(one, text, len(text)):
                    found[gpu].append(text.value.decode())
    except (OSError, AttributeError):  # no driver, or one without MIG
        return {}
    return found


def torch_device(name: str) -> torch.device:
    """The device of a rank as the rank's process names it; with a MIG slice it sees no other GPU.

    >>> torch_device("cuda:3"), torch_device("MIG-5c1b")
    (device(type='cuda', index=3), device(type='cuda', index=0))
    """
    with uninterrupted():
        import torch

    return torch.device("cuda", 0) if name.startswith("MIG-") else torch.device(name)


def rank_variables(devices: Sequence[str], rank: int) -> dict[str, str]:
    """What a rank's process gets before CUDA starts there: its device, its MIG slice, and the note on its times."""
    variables = {
        DEVICE_VARIABLE: str(torch_device(devices[rank])),
        TIMES_VARIABLE: TIMES_NOTE if shared(devices) else "",
    }
    if devices[rank].startswith("MIG-"):  # a process sees one slice
        variables["CUDA_VISIBLE_DEVICES"] = devices[rank]
    return variables


def shared(devices: Sequence[str]) -> bool:
    """Whether some ranks compute on one GPU. MIG slices count as one GPU: they share its memory bus.

    >>> shared(["cuda:0", "cuda:1"]), shared(["cuda:0", "cuda:0"]), shared(["MIG-1", "MIG-2"]), shared(["cpu", "cpu"])
    (False, True, True, False)
    """
    cards = ["MIG" if name.startswith("MIG-") else name for name in devices if name != "cpu"]
    return len(set(cards)) < len(cards)


def choose(
    call: str,
    world_size: int,
    backend: str | None = None,
    share_gpu: bool = False,
    devices: Any = None,
    *,
    gpus: Sequence[str],
    owner: str = "this machine",
    count: str = "n",
) -> Choice:
    """The backend and devices for `world_size` ranks, or a LaunchError with a fix.

    ===========================  ==============================================================
    request                      result
    ===========================  ==============================================================
    nothing, ranks <= GPUs       NCCL, one GPU per rank
    nothing, ranks > GPUs        Gloo on the CPU, and a notice if GPUs stay unused
    ``share_gpu=True``           one GPU per rank if there are enough; otherwise Gloo carries GPU
                                 tensors, and neighbouring ranks share a GPU
    ``devices=[0, 1]``           these GPUs only; an error if they are too few, unless shared
    ``devices="cpu"``            Gloo on the CPU
    ``backend="gloo"``           the CPU, unless ``share_gpu`` or ``devices`` requests GPUs
    ``backend="nccl"``           an error unless each rank has its own GPU
    ===========================  ==============================================================

    call: how errors name the call, such as "launch(n=2". gpus: what `visible_gpus` returns. owner: what has these
    GPUs. count: the argument that sets the number of ranks.
    """
    backend = checked_backend(call, backend)
    if not isinstance(share_gpu, bool):
        raise LaunchError(f"{call}, share_gpu={share_gpu!r}): expected True or False. Fix: share_gpu=True.")
    listed = None if devices is None else checked_devices(call, devices, gpus, owner)
    if listed == ("cpu",):
        for name, value in (("backend", backend), ("share_gpu", share_gpu)):
            if value in ("nccl", True):
                raise LaunchError(
                    f"{call}, {name}={value!r}, devices='cpu'): {name}={value!r} needs a GPU. Fix: leave out {name}."
                )
        return Choice("gloo", ("cpu",) * world_size)
    usable = tuple(gpus) if listed is None else listed
    has = f"{owner} has {counted(gpus)}" if listed is None else f"devices names {counted(listed)}"
    if listed is not None and len(listed) > world_size:
        raise LaunchError(
            f"{call}, devices={devices!r}): {counted(listed)} for {ranks_text(world_size)}. "
            f"Fix: devices={list(devices)[:world_size]!r}, or {count}={len(listed)}."
        )
    if backend == "gloo" and listed is None and not share_gpu:
        return Choice("gloo", ("cpu",) * world_size)
    if share_gpu and not usable:
        raise LaunchError(f"{call}, share_gpu=True): {has} to share. Fix: leave out share_gpu to use the CPU.")
    placed = tuple(usable[rank * len(usable) // world_size] for rank in range(world_size)) if usable else ()
    if len(usable) >= world_size:
        placed = usable[:world_size]
    alone = bool(placed) and not shared(placed)
    if alone:
        return Choice(backend or "nccl", placed)
    if backend == "nccl":
        raise LaunchError(
            f"{call}, backend='nccl'): NCCL needs one GPU per rank, and {has}. Fix: "
            + (f"share_gpu=True without backend, or {count}={_own(usable)}." if usable else "leave out backend.")
        )
    if share_gpu:
        return Choice("gloo", placed)
    if listed is not None:
        raise LaunchError(
            f"{call}, devices={devices!r}): {ranks_text(world_size)} and {counted(listed)}. "
            f"Fix: share_gpu=True, or {count}={_own(usable)}."
        )
    notice = ""
    if usable:
        notice = (
            f"{ranks_text(world_size)} on the CPU over Gloo: NCCL needs one GPU per rank, and {has}. "
            f"To compute on a GPU, pass {count}={_own(usable)} or share_gpu=True."
        )
    return Choice("gloo", ("cpu",) * world_size, notice)


def shares_by_default(backend: Any, devices: Any, gpus: Sequence[str]) -> bool:
    """Whether ``RECSHARD_SHARE_GPU=1`` is set: share_gpu=True for calls without backend and devices, if there is a GPU.

    Raises:
        LaunchError: the variable is neither "1" nor "0" nor empty.
    """
    value = os.environ.get(SHARE_VARIABLE, "")
    if value not in ("", "0", "1"):
        raise LaunchError(f"{SHARE_VARIABLE}={value!r}: expected 1 or 0. Fix: {SHARE_VARIABLE}=1.")
    return value == "1" and backend is None and devices is None and bool(gpus)


def checked_backend(call: str, backend: Any) -> str | None:
    """`backend` if it is "gloo", "nccl" or None; otherwise a LaunchError."""
    if backend is not None and backend not in ("gloo", "nccl"):
        raise LaunchError(f"{call}, backend={backend!r}): expected 'gloo', 'nccl' or None. Fix: leave out backend.")
    return None if backend is None else str(backend)


def checked_devices(call: str, devices: Any, gpus: Sequence[str], owner: str = "this machine") -> tuple[str, ...]:
    """``devices=`` as entries of `gpus`, or ("cpu",); a LaunchError for anything else."""
    given = f"{call}, devices={devices!r})"
    if str(devices) == "cpu":
        return ("cpu",)
    if str(devices).partition(":")[0] == "mps":
        raise LaunchError(f"{given}: {MPS}. Fix: devices='cpu'.")
    if isinstance(devices, str) or not isinstance(devices, Iterable):
        raise LaunchError(f"{given}: expected a list of GPUs, or 'cpu'. Fix: devices=[0].")
    entries = list(devices)
    if not entries:
        raise LaunchError(f"{given}: the list names no GPU. Fix: leave out devices, or devices='cpu'.")
    found: list[str] = []
    for entry in entries:
        name = named_gpu(given, entry, gpus, owner)
        if name in found:
            raise LaunchError(
                f"{given}: {entry!r} names a GPU that is listed already. "
                "Fix: name each GPU once, and pass share_gpu=True to place several ranks on it."
            )
        found.append(name)
    return tuple(found)


def named_gpu(given: str, entry: Any, gpus: Sequence[str], owner: str) -> str:
    """The one of `gpus` that an entry of ``devices=`` names: an index, "cuda:K", or the UUID of a GPU or MIG slice."""
    text = str(entry)
    if text.partition(":")[0] == "mps":
        raise LaunchError(f"{given}: {MPS}. Fix: devices='cpu'.")
    visible = f"{owner} has {counted(gpus)} visible" + (f": {', '.join(gpus)}" if gpus else "")
    fix = f"Fix: devices={list(range(len(gpus)))!r}." if gpus else "Fix: leave out devices."
    index = -1
    if isinstance(entry, int) and not isinstance(entry, bool):
        index = entry
    elif text.startswith("cuda:") and text[5:].isdecimal():
        index = int(text[5:])
    elif isinstance(entry, str) and entry.startswith(("GPU-", "MIG-")):
        index = position_of(entry, gpus)
    else:
        raise LaunchError(
            f"{given}: {entry!r} is not a GPU. Expected an index such as 0, or a UUID such as 'GPU-...' or 'MIG-...'. "
            + fix
        )
    if not 0 <= index < len(gpus):
        raise LaunchError(f"{given}: {entry!r} does not exist: {visible}. {fix}")
    return gpus[index]


def position_of(uuid: str, gpus: Sequence[str]) -> int:
    """Which of `gpus` has a UUID, or begins with it as CUDA allows; -1 if none or several do."""
    import torch

    if uuid.startswith("MIG-"):
        names: list[str] = list(gpus)
    else:
        everything: list[str] = []
        with suppress(OSError):  # no NVML
            everything = torch.cuda._raw_device_uuid_nvml() or []
        shown = torch.cuda._parse_visible_devices()  # indices, or UUIDs if the variable holds UUIDs
        names = [str(gpu) if isinstance(gpu, str) else (everything[gpu : gpu + 1] or [""])[0] for gpu in shown]
        names = [next((full for full in everything if full.startswith(name)), name) for name in names][: len(gpus)]
    matching = [index for index, name in enumerate(names) if name.startswith(uuid)]
    return matching[0] if len(matching) == 1 else -1


def counted(gpus: Sequence[str]) -> str:
    """
    >>> counted(()), counted(["cuda:0"]), counted(["cuda:0", "cuda:1"])
    ('no GPU', '1 GPU', '2 GPUs')
    >>> counted(["MIG-1", "MIG-2"])
    '2 MIG slices, which count as one GPU'
    """
    if any(name.startswith("MIG-") for name in gpus):
        return f"{len(gpus)} MIG slices, which count as one GPU" if len(gpus) > 1 else "1 MIG slice"
    return "no GPU" if not gpus else f"{len(gpus)} GPU{'s' if len(gpus) > 1 else ''}"


def ranks_text(count: int) -> str:
    """
    >>> ranks_text(1), ranks_text(2)
    ('1 rank', '2 ranks')
    """
    return f"{count} rank{'s' if count > 1 else ''}"


def _own(gpus: Sequence[str]) -> int:
    """The number of ranks that can have separate GPUs."""
    return len({"MIG" if name.startswith("MIG-") else name for name in gpus})
