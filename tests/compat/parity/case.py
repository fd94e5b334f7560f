"""What a parity case needs: the decorator, values as JSON, and ranks. Imports neither TorchRec nor this library."""

import json
import os
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

STRUCTURES = ("KeyedJaggedTensor", "JaggedTensor", "KeyedTensor")


@dataclass(frozen=True)
class Case:
    """One script.

    Args:
        run: returns what is observed.
        names: TorchRec's public names that it uses, with their modules.
        differs: why this library gives another result on purpose; empty if both must give the same.
    """

    run: Callable[[], Any]
    names: tuple[str, ...]
    differs: str = ""


def case(*names: str, differs: str = "", ranks: int = 0) -> Callable[[Callable[..., Any]], Case]:
    """Makes a function a case; it begins with the same random seed under both libraries.

    Args:
        names, differs: as in `Case`.
        ranks: the function is called with each rank in a group of this size, as by `on_ranks`. 0: in no group.
    """
    return lambda run: Case((lambda: on_ranks(ranks, run)) if ranks else run, names, differs)


def observed(one: Case) -> Any:
    """What a case returns, as JSON."""
    torch.manual_seed(0)
    return plain(one.run())


def raised(action: Callable[[], Any]) -> str:
    """The type of the error that a call raises; "nothing" if it returns."""
    try:
        action()
    except Exception as error:
        return next(kind.__name__ for kind in type(error).__mro__ if kind.__module__ == "builtins")
    return "nothing"


def plain(value: Any) -> Any:
    """A value as JSON: tensors with dtype and shape, structures by their parts.

    Raises:
        TypeError: another object. Return its parts.
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value.value if isinstance(value, Enum) else value
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, torch.Tensor):
        data = value.detach()
        shown = {"dtype": str(data.dtype), "shape": list(data.shape)}
        if data.is_meta:
            return shown
        return {**shown, "values": data.float().tolist() if data.is_floating_point() else data.tolist()}
    if isinstance(value, torch.dtype | torch.device | torch.Size):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): plain(part) for key, part in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(part) for part in (sorted(value) if isinstance(value, set | frozenset) else value)]
    kind = type(value).__name__
    if kind in STRUCTURES:
        parts: dict[str, Any] = {} if kind == "JaggedTensor" else {"keys": value.keys()}
        parts["values"] = value.values()
        if kind == "KeyedTensor":
            parts["length_per_key"] = value.length_per_key()
        else:
            parts |= {"lengths": value.lengths(), "weights": value.weights_or_none()}
        return {kind: plain(parts)}
    if isinstance(value, type):
        return value.__name__
    raise TypeError(f"a case returned a {kind}, which has no form in JSON. Fix: return its parts")


def on_ranks(world_size: int, job: Callable[[int], Any]) -> list[Any]:
    """Runs `job(rank)` in forked processes of one Gloo group; its results by rank, as JSON."""
    import torch._dynamo

    context = torch.multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        ranks = [context.Process(target=_rank, args=(rank, world_size, job, folder)) for rank in range(world_size)]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join(120)
        late = [number for number, rank in enumerate(ranks) if rank.is_alive()]
        for rank in ranks:
            rank.kill()
        if late or any(rank.exitcode for rank in ranks):
            raise RuntimeError(f"ranks {late} did not end; exit codes {[rank.exitcode for rank in ranks]}")
        return [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(world_size)]


def _rank(rank: int, world_size: int, job: Callable[[int], Any], folder: str) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world_size), "LOCAL_RANK": str(rank)}
    os.environ["LOCAL_WORLD_SIZE"] = str(world_size)
    torch.manual_seed(0)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world_size)
    Path(folder, f"{rank}.json").write_text(json.dumps(plain(job(rank))))
    dist.barrier()
    dist.destroy_process_group()
