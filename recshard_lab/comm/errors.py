"""An error of one rank as a message, and as the other ranks raise it."""

from __future__ import annotations

import builtins
import pickle
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from ctypes import string_at
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore

from recshard_lab.comm.env import ShardingEnv

_RANK = "_rank"  # attribute of an error whose text names this rank


class Failure(NamedTuple):
    """An exception as a message between ranks: the names of its classes, most derived first, and its text.

    Attributes:
        rank: that the text names; None if it names none.
    """

    classes: tuple[tuple[str, str], ...]
    text: str
    errno: int | None
    rank: int | None


def failing_rank(error: BaseException) -> int | None:
    """The rank that an error of `agreed`, or of a step, names; None for other errors."""
    rank: int | None = getattr(error, _RANK, None)
    return rank


def described(error: Exception) -> Failure:
    """An error as a message between ranks."""
    classes = tuple((kind.__module__, kind.__qualname__) for kind in type(error).__mro__)
    try:
        text = str(error)
    except Exception:  # the text of the error raises, too
        text = "an error without a readable message"
    return Failure(classes, text, getattr(error, "errno", None), failing_rank(error))


def named_after(error: Exception, env: ShardingEnv) -> Exception:
    """An error of this rank as all ranks raise it: its text names the rank."""
    if failing_rank(error) is not None:
        return error
    named = rebuilt(described(error), env.world.rank)
    named.__cause__ = error
    return named


def rebuilt(failure: Failure, rank: int = 0) -> Exception:
    """The error of ``rank`` as the nearest base class that this process knows and that takes one string.

    >>> rebuilt(described(KeyError("t")), 1)
    LookupError("rank 1: KeyError: 't'")
    """
    prefix = f"rank {rank}: " if failure.rank is None else ""
    with_class = f"{prefix}{failure.classes[0][1]}: {failure.text}"
    for number, (module, name) in enumerate(failure.classes):
        text = with_class if number else f"{prefix}{failure.text}"
        kind = getattr(builtins if module == "builtins" else sys.modules.get(module), name, None)
        if not (isinstance(kind, type) and issubclass(kind, Exception)) or kind is Exception:
            continue
        with suppress(Exception):  # a class that takes other arguments, or changes the text
            error: Exception = kind(text)
            if str(error) == text:
                break
    else:
        error = RuntimeError(with_class)
    if isinstance(error, OSError):
        error.errno = failure.errno
    setattr(error, _RANK, rank if failure.rank is None else failure.rank)
    return error


# An error of one rank between messages: the rank sends its other messages marked, and every rank raises the error.
#
# Without it, the rank that raises leaves while the others wait for its message. If a part of a step raises, `complete`
# runs a function that issues the messages that the part had still to issue::
#
#     rank 1     error -> stores its text under the number of the next message -> sends all bytes 0xFF -> raises
#     rank 0     waits -> the first bytes from rank 1 are 0xFF -> reads the text -> raises it, marks its next messages
#
# On CPU a receiver compares the first bytes of each sender's part. It reads the store only if they are 0xFF, so a step
# without errors has no further message. NaN of a model has other bits, and nothing is stored for it.
#
# On an accelerator the host would have to wait for the comparison. There these messages are zeros, and `Failed.known`
# is False: the caller sends the error with the next sizes message.


_MARK = 0xFF  # of every byte: NaN in all floating-point formats
_MARKED = bytes([_MARK] * 8)  # what is compared


@dataclass
class _Failing:
    """A part of a step that this thread completes after an error.

    Attributes:
        failure: the error as a message.
        env: all ranks of the step.
        issued: messages that were issued before the error, and are not issued again.
        informed: ranks of the world that receive a marked message which they compare.
    """

    failure: Failure
    env: ShardingEnv
    issued: int
    informed: set[int]

    @property
    def known(self) -> bool:
        """Whether these are all other ranks of the step."""
        return set(self.env.world_ranks) <= self.informed | {self.env.world.rank}


class _Thread(threading.local):
    def __init__(self) -> None:
        self.issued = 0
        self.failing: _Failing | None = None
        self.numbers: dict[str, int] = {}


_thread = _Thread()


class RankLost(RuntimeError):
    """Another rank does not send what this one waits for, and will not. The connections between them are closed."""


class Failed(Exception):
    """A part of a step failed, and its messages were issued.

    Args:
        error: names the rank. Its cause is the error itself, where this is the rank.
        informed: ranks that receive a marked message from this rank.
        known: whether every rank receives one.
    """

    def __init__(self, error: Exception, informed: set[int], known: bool) -> None:
        super().__init__(str(error))
        self.error, self.informed, self.known = error, informed, known


def num_issued() -> int:
    """How many messages of steps this thread has issued."""
    return _thread.issued


def complete(env: ShardingEnv, error: Exception, issued: int, rest: Callable[[], object]) -> Failed:
    """Completes a part of a step after an error: issues its messages, marked.

    Args:
        env: the ranks.
        error: of this part, or of an earlier one of this step.
        issued: `num_issued` before the part.
        rest: makes the calls of the part that issue messages, from the first one, with any numbers in them. Messages
            that the part had issued are not issued again.

    Raises:
        RankLost: another rank sends nothing.
        Exception: the error itself on one rank, which has no peers; also if ``rest`` raises.
    """
    informed, known = set[int](), False
    if isinstance(error, Failed):
        named, informed, known = error.error, error.informed, error.known
    elif env.pg is None or isinstance(error, RankLost):
        raise error
    else:
        if isinstance(error, MemoryError | torch.OutOfMemoryError):
            traceback.clear_frames(error.__traceback__)  # their tensors, for `rest`
        named = named_after(error, env)
    keep_for_others(named, env)
    failing = _thread.failing = _Failing(described(named), env, _thread.issued - issued, informed)
    try:
        rest()
    finally:
        _thread.failing = None
    return Failed(named, informed, known or failing.known)


def keep_for_others(error: Exception, env: ShardingEnv) -> None:
    """Keeps an error of these ranks for the larger group of which they are a part, until `mark` sends it."""
    if env.outer is not None:
        env.outer.unsent[:] = [described(named_after(error, env))]


def error_for(env: ShardingEnv) -> Exception | None:
    """The error that `keep_for_others` has kept for these ranks. Forgets it."""
    return rebuilt(env.unsent.pop()) if env.unsent else None


def mark(message: Tensor, env: ShardingEnv) -> None:
    """Marks a message on CPU that these ranks will add, if there is an error that `keep_for_others` has kept."""
    if env.unsent:
        message.fill_(torch.nan)
        store().set(_key(env, env.wire.issued), pickle.dumps((env.unsent[0], True)))


def is_failing() -> bool:
    """Whether this thread completes a part of a step after an error. Nothing that it receives matters."""
    return _thread.failing is not None


def outgoing(tensor: Tensor, sends: Sequence[int], env: ShardingEnv) -> Tensor | None:
    """What to send in place of ``tensor``: itself; a marked message after an error; None if it was sent before."""
    failing = _thread.failing
    if failing is None:
        _thread.issued += 1
        return tensor
    if failing.issued:
        failing.issued -= 1
        return None
    message = torch.zeros_like(tensor)
    if tensor.device.type == "cpu":
        message.view(torch.uint8).fill_(_MARK)
        failing.informed |= {rank for rank, number in zip(env.world_ranks, sends, strict=True) if number}
        store().set(_key(env, env.wire.issued), pickle.dumps((failing.failure, failing.known)))
    return message


def note_sent(number: int, env: ShardingEnv) -> None:
    """Keeps the number of a message on CPU tensors for `sent_numbers`."""
    _thread.numbers[env.pg.group_name] = number


def sent_numbers() -> dict[str, int]:
    """Group -> number of the last message on CPU tensors that this thread has issued over it."""
    return dict(_thread.numbers)


def raise_if_marked(received: Tensor, receives: Sequence[int], number: int, env: ShardingEnv, summed: bool) -> None:
    """Raises the error of the rank that marked a message.

    Args:
        received: on CPU, flat.
        receives: elements from each rank.
        number: of the message, as `Wire.issued` was before it.
        env: the ranks.
        summed: whether the network added the messages of all ranks.
    """
    if received.numel() == 0:
        return
    if not (bool(received[0].isnan()) if summed else _starts_with_mark(received, receives)):
        return
    key = _key(env, number)
    if store().check([key]):
        failure, known = pickle.loads(store().get(key))
        raise Failed(rebuilt(failure), set(), known)


def _starts_with_mark(received: Tensor, receives: Sequence[int]) -> bool:
    address, size = received.data_ptr(), received.element_size()
    for elements in receives:
        compared = min(elements * size, len(_MARKED))
        if compared and string_at(address, compared) == _MARKED[:compared]:
            return True
        address += elements * size
    return False


def store() -> Any:
    """The store where ranks leave the text of their errors."""
    return PrefixStore("recshard_lab", dist.distributed_c10d._get_default_store())


def _key(env: ShardingEnv, number: int) -> str:
    return f"failed/{env.pg.group_name}/{number}"


def raise_after_backward(error: Exception, callbacks: int = 3) -> None:
    """Raises ``error`` from ``backward()`` when it has computed all gradients. Call it inside a backward.

    So collectives of other modules in this backward, such as DistributedDataParallel's, run on every rank. That class
    queues a callback in a callback, to wait for its all-reduce, so the error is raised ``callbacks`` levels deeper.
    """

    def called() -> None:
        nonlocal error
        try:
            if not callbacks:
                raise error
            raise_after_backward(error, callbacks - 1)
        finally:
            del error  # its traceback has this frame

    torch.autograd.Variable._execution_engine.queue_callback(called)
