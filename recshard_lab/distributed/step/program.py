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
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from recshard_lab.distributed.step.batch import Step

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
