"""The ledger device itself: what it refuses, what it counts, to the operator, the wait and the byte."""

from typing import Any

import pytest
import torch

from recshard_lab import RankError
from tests.ledger.jobs import counted

CPU_ONLY = [1.0, 2.0, 3.0, 4.0]


def ones(*size: int) -> torch.Tensor:
    return torch.ones(*size, device="ledger")


MIXTURES = {
    "sum": lambda _: ones(3) + torch.ones(3),
    "in place on the device": lambda _: ones(3).add_(torch.ones(3)),
    "in place on the host": lambda _: torch.ones(()).add_(ones(())),
    "cat": lambda _: torch.cat([ones(3), torch.ones(3)]),
    "rows by host ids": lambda _: ones(3).index_select(0, torch.tensor([0])),
    "host rows by device ids": lambda _: torch.ones(3)[torch.zeros(1, dtype=torch.int64, device="ledger")],
    "a 0-dim tensor of the device": lambda _: torch.ones(3) + ones(()),
    "numpy": lambda _: ones(3).numpy(),
}


@pytest.mark.gate
@pytest.mark.parametrize("name", MIXTURES)
def test_mixed_devices_are_refused(one_rank: Any, name: str) -> None:
    with pytest.raises(RankError, match=r"same device|not supported for tensor subclasses"):
        one_rank.run(counted, MIXTURES[name])


WAITS = {
    "item": (lambda x: x[0].item(), ["_local_scalar_dense"]),
    "bool": (lambda x: bool((x > 0).all()), ["_local_scalar_dense"]),
    "tolist": (lambda x: x.tolist(), ["copy to host"]),
    "copy to pageable memory": (lambda x: torch.empty(4).copy_(x, non_blocking=True), ["copy to host"]),
    "non-blocking to the host": (lambda x: x.to("cpu", non_blocking=True), []),
    "tensor from a list": (lambda x: torch.tensor([1, 2], device=x.device), ["copy to device"]),
    "from pageable memory": (lambda x: torch.ones(2).to(x.device), ["copy to device"]),
    "from pinned memory": (lambda x: torch.ones(2).pin_memory().to(x.device, non_blocking=True), []),
    "from pinned memory, blocking": (lambda x: torch.ones(2).pin_memory().to(x.device), ["copy to device"]),
    "nonzero": (lambda x: x.nonzero(), ["nonzero"]),
    "masked_select": (lambda x: x.masked_select(x > 1), ["masked_select"]),
    "a mask as index": (lambda x: x[x > 1], ["index"]),
    "a mask filled with a number": (lambda x: x.clone().__setitem__(x > 1, 0.0), []),
    "a mask filled with a tensor": (lambda x: x.clone().__setitem__(x > 2, ones(2)), ["index_put_"]),
    "a list as index": (lambda x: x[[0, 1]], ["copy to device"]),
    "host ids as index": (lambda x: x[torch.tensor([0])], ["copy to device"]),
    "device ids as index": (lambda x: x[x.long() * 0], []),
    "unique": (lambda x: x.unique(), ["_unique2"]),
    "equal": (lambda x: torch.equal(x, x + 0), ["equal"]),
    "bincount": (lambda x: x.long().bincount(), ["bincount"]),
    "repeat_interleave": (lambda x: x.repeat_interleave(x.long()), ["repeat_interleave"]),
    "repeat_interleave of known size": (lambda x: x.repeat_interleave(x.long(), output_size=10), []),
    "arithmetic": (lambda x: (x.sort().values.cumsum(0) * 2).sum(), []),
}


@pytest.mark.parametrize("name", WAITS)
def test_waits_are_those_of_cuda(one_rank: Any, name: str) -> None:
    action, causes = WAITS[name]

    def alone(room: Any) -> Any:
        x = torch.tensor(CPU_ONLY, device="ledger")
        with room.record() as counts:
            action(x)
        return [sync.cause for sync in counts.syncs]

    ((_, found),) = one_rank.run(counted, alone)
    assert found == causes


def test_copies_are_counted_by_direction_and_pinned_memory(one_rank: Any) -> None:
    def copies(_: Any) -> None:
        x = torch.ones(10).to("ledger")
        torch.ones(5).pin_memory().to("ledger", non_blocking=True)
        x.cpu()
        x[:2].to("cpu", non_blocking=True)

    ((counts, _),) = one_rank.run(counted, copies)
    assert counts["to_device"] == {"count": 2, "bytes": 60, "pinned_bytes": 20}
    assert counts["to_host"] == {"count": 2, "bytes": 48, "pinned_bytes": 8}
    assert [sync["cause"] for sync in counts["syncs"]] == ["copy to device", "copy to host"]


def test_live_and_peak_bytes_are_exact_by_kind(one_rank: Any) -> None:
    def memory(room: Any) -> Any:
        before = dict(room.live)
        weight = ones(100)
        room.mark(weight, "weights")
        with room.record() as counts:
            with room.allocating("activations"):
                kept = weight * 2  # 400
            buffer = ones(50)  # 200
            view = buffer[10:20]  # nothing
            del buffer
            during = room.live["buffers"] - before["buffers"]  # the view keeps it
            del view
            small = ones(10)  # 40, after 200 were freed
            del small
        live = {kind: room.live[kind] - before[kind] for kind in before}
        return (
            during,
            live,
            counts.peak_extra_bytes,
            counts.peak["activations"] - counts.live_at_start["activations"],
            kept.shape,
        )

    ((_, (during, live, extra, activations, _)),) = one_rank.run(counted, memory)
    assert during == 200
    assert live == {"weights": 400, "state": 0, "activations": 400, "buffers": 0}
    assert (extra, activations) == (600, 400)


def test_what_ranks_return_from_their_device_arrives_on_the_cpu(one_rank: Any) -> None:
    def tensors(_: Any) -> Any:
        weight = torch.nn.Parameter(torch.arange(3.0).to("ledger"))
        large = torch.arange(1 << 20).to("ledger")  # through shared memory
        return {"weight": weight, "again": weight, "large": [large]}

    ((_, found),) = one_rank.run(counted, tensors)
    assert {value.device.type for value in (found["weight"], *found["large"])} == {"cpu"}
    assert isinstance(found["weight"], torch.nn.Parameter)
    assert found["weight"] is found["again"]
    assert torch.equal(found["weight"].detach(), torch.arange(3.0))
    assert torch.equal(found["large"][0], torch.arange(1 << 20))
