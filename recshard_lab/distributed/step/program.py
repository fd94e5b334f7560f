"""A step as lists of calls. A plan and the form of a batch fix all of them, so they are made once and run many times.

::

    route --sizes--> send --ids--> look_up, give --rows--> join          forward
    split --gradients--> update                                          backward

Each stage waits for the message before it, computes, and issues the next one. What a model computes between two stages
overlaps with a message. `look_up` reads the tables, and `give` issues the rows: tables may step between them.

`route` and `send` are functions of `InputDist`, whose indices the form of a batch fixes (`Wiring`). An error of theirs
travels in the message of sizes, so they have nothing to drain. The stages from `look_up` on are lists of calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor

from recshard_lab.comm import Pending
from recshard_lab.distributed.step.batch import LookupInput
from recshard_lab.distributed.step.gradients import KernelGradients
from recshard_lab.distributed.step.messages import Change, Columns, Message
from recshard_lab.embedding.scaled_loss import StepsInBackward

STAGES = ("look_up", "give", "join", "split", "update")


class Signature(NamedTuple):
    """The form of a batch, as far as it fixes calls from the lookup on. The numbers of ids are not part of it.

    Attributes:
        segments: ``[W]`` S of each rank; in a variable batch the width of ``LookupInput.lengths`` alone.
        rows: of each area of the output: B, or in a variable batch the bags of each block.
        bags: ``[W, L]`` in a variable batch, bags of exchanged shard features by source rank; else None.
        deferred: whether tables keep their gradients until the optimizer's step.
        weight_gradients: whether per-sample weights require a gradient on any rank.
    """

    segments: tuple[int, ...]
    rows: tuple[int, ...]
    bags: tuple[tuple[int, ...], ...] | None
    deferred: bool
    weight_gradients: bool


class Call(NamedTuple):
    """One function of a stage.

    Attributes:
        name: for recorders and traces of errors.
        run: takes the step. Recorders see what it returns.
        drain: called in place of ``run`` after an error: issues the messages for which other ranks wait, with any
            numbers in them. Their sizes follow from the signature and from the sizes that ranks have sent. None of a
            call without a message.
    """

    name: str
    run: Callable[[Step], Any]
    drain: Callable[[Step], Any] | None = None


Calls = Mapping[str, list[Call]]
"""Stage -> the calls that one part of the step adds to it."""


Program = Mapping[str, tuple[Call, ...]]
"""Stage -> its calls, in order."""


def compile_step(parts: Iterable[Callable[[Signature], Calls]], signature: Signature) -> Program:
    """The calls of each stage, in the order of the parts."""
    found = [part(signature) for part in parts]
    return {stage: tuple(call for calls in found for call in calls.get(stage, ())) for stage in STAGES}


@dataclass(slots=True, eq=False)
class Step(StepsInBackward):
    """One batch from the lookup to the end of backward.

    After an error, of this rank or of another one, its stages send their messages alone, and step nothing.

    Attributes:
        lookup_input: the ids to look up here.
        program: the calls of each stage.
        trains: whether backward will step the tables.
        failed: the error of this step, if there was one.
        table: the name of a table, for errors.
        rows: ``[T, d]`` of each exchanged, then of each replicated kernel.
        kept: what each exchanged kernel needs in backward.
        managed_rows: of managed tables, the row of each id that was looked up here.
        order: of rows that arrive, computed while they travel.
        output: ``[B, output width]``; flat for sequences and variable batches.
        grad: its gradient.
        grads: ``[T, width]`` of each output path: gradients of rows, from all ranks.
        copy_grads: the same of replicated kernels.
        columns: these, read kernel by kernel.
        kernels: the gradients of each kernel that has not stepped.
        weights: for each kernel, the gradient of per-sample weights.
        copies: for each replicated shard feature, the gradient of per-sample weights.
        weight_grad: of this rank's per-sample weights.
        pending: messages under way, and how the rows of each are decoded.
        message_bytes: sent and received by this pass.
    """

    lookup_input: LookupInput
    program: Program
    trains: bool
    failed: Exception | None = None
    table: str = ""
    rows: list[Tensor] = field(default_factory=list)
    kept: list[Any] = field(default_factory=list)
    managed_rows: list[Tensor] = field(default_factory=list)
    order: Any = None
    output: Tensor = field(init=False)
    grad: Tensor = field(init=False)
    grads: list[Tensor] = field(default_factory=list)
    copy_grads: list[Tensor] = field(default_factory=list)
    columns: Columns = field(init=False)
    kernels: dict[int, KernelGradients] = field(default_factory=dict)
    weights: dict[int, Tensor | None] = field(default_factory=dict)
    copies: dict[int, Tensor] = field(default_factory=dict)
    weight_grad: Tensor | None = None
    pending: dict[str, tuple[Pending, Change | None]] = field(default_factory=dict)
    message_bytes: int = 0

    def send(self, name: str, message: Message, rows: Tensor) -> None:
        """Sends rows, flat. `arrived` of this name waits for those of the other ranks."""
        encoded = rows if message.encode is None else message.encode(rows)
        self.pending[name] = message.send(encoded), message.decode
        self.message_bytes += message.bytes

    def arrived(self, name: str, empty: Tensor) -> Tensor:
        """The rows of a message, flat, sender after sender; ``empty`` if none was sent."""
        if name not in self.pending:
            return empty
        pending, decode = self.pending.pop(name)
        received = pending.wait()
        return received if decode is None else decode(received)
