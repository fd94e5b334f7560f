"""The program that a CUDA graph repeats: it never waits for the device, and its shapes do not depend on the batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from recshard_lab import shard_for_inference
from tests.ledger import jobs
from tests.ledger.jobs import counted
from tests.serving.capture_jobs import Ranker, batches, collection, served_by

MOST = 6  # ids of a sample


def plain(output: Any) -> list[torch.Tensor]:
    """The numbers of an output, on the host."""
    values = [part.values() for part in output.values()] if isinstance(output, dict) else [output.values()]
    return [one.cpu() for one in values]


def program_of(room: Any, kind: str, scheme: str, dtype: str | None, whole: Any) -> tuple[Any, list[Any]]:
    """The waits inside the program, and for each of three batches the operators that it ran, with sizes."""
    served = served_by(whole, scheme, ["ledger"], dtype)
    captured = served.capture(batches(kind, [4])[0], batch_sizes=[8], ids_per_sample=MOST)
    (program,) = captured._programs
    program.program()  # makes constants
    waits, runs = [], []
    plainly = served_by(whole, scheme, ["cpu"], dtype)
    for batch in batches(kind, [1, 5, 8]):
        program.inputs[0].load(batch)
        with room.record() as counts:
            output = program.program()
        waits += [str(sync) for sync in counts.syncs]
        runs.append((dict(counts.operators), counts.events, counts.peak_extra_bytes))
        found, expected = plain(captured(batch)), plain(plainly(batch))
        torch.testing.assert_close(found, expected)
        del output
    return waits, runs


@pytest.mark.gate
@pytest.mark.parametrize("kind", ["pooled", "weighted", "sequence"])
@pytest.mark.parametrize("dtype", [None, "int8"])
@pytest.mark.parametrize("scheme", ["row_wise", "column_wise"])
def test_the_program_waits_for_nothing_and_is_the_same_for_every_batch(
    one_rank: Any, scheme: str, dtype: str | None, kind: str
) -> None:
    def program(room: Any) -> Any:
        return program_of(room, kind, scheme, dtype, collection(kind))

    ((_, (waits, runs)),) = one_rank.run(counted, program)
    assert waits == []
    assert runs[0] == runs[1] == runs[2]


def test_the_call_copies_from_pinned_memory_alone(one_rank: Any) -> None:
    """With a dense part: no copy to the device waits."""

    def call(room: Any) -> Any:
        served = shard_for_inference(Ranker(collection("pooled")), devices=["ledger"])
        (batch,) = batches("pooled", [4])
        captured = served.capture(torch.zeros(4, 3), batch, batch_sizes=[4], ids_per_sample=MOST)
        captured(torch.rand(4, 3), batch)
        with room.record() as counts:
            captured(torch.rand(4, 3), batch)
        sent = counts.to_device
        return [str(sync) for sync in counts.syncs], sent.count, sent.bytes, sent.pinned_bytes, captured.eager_calls

    ((_, (waits, count, size, pinned, eager)),) = one_rank.run(counted, call)
    assert (waits, eager) == ([], 0)
    assert count == 3  # dense numbers, ids, lengths
    assert size == pinned > 0


def test_shards_on_two_kinds_of_devices_are_refused(one_rank: Any) -> None:
    def message(_: Any) -> str:
        served = served_by(collection("pooled"), "row_wise", ["ledger", "cpu"])
        with pytest.raises(ValueError, match="a graph runs on one device") as error:
            served.capture(batches("pooled", [4])[0])
        return str(error.value)

    ((_, text),) = one_rank.run(counted, message)
    assert text == "a graph runs on one device, and the shards are on cpu, ledger. Fix: devices=['ledger']"


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU here")
@pytest.mark.parametrize("kind", ["pooled", "weighted", "sequence"])
@pytest.mark.parametrize("dtype", [None, "int8"])
def test_graphs_compute_what_the_model_computes(dtype: str | None, kind: str) -> None:
    served = served_by(collection(kind), "row_wise", ["cuda:0"], dtype)
    captured = served.capture(batches(kind, [4])[0], batch_sizes=[2, 8], ids_per_sample=MOST)
    assert captured.uses_graphs
    for batch in batches(kind, [1, 2, 5, 8, 1]):
        torch.testing.assert_close(plain(captured(batch)), plain(served(batch)))
        with jobs.without_waiting("cuda"):
            captured._programs[-1]._graph.replay()
    assert captured.eager_calls == 0
