"""An error of one rank as a message, and as the other ranks raise it."""

import builtins
import sys
from dataclasses import dataclass

from recshard_lab.comm.groups import ShardingEnv

_RANK = "_rank"  # attribute of an error whose text names this rank


@dataclass(frozen=True)
class Failure:
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
    named = rebuilt(described(error), in_world(env.rank, env))
    named.__cause__ = error
    return named


def in_world(rank: int, env: ShardingEnv) -> int:
    """The number of a rank of ``env`` among all ranks."""
    while env.outer is not None:
        rank, env = env.members[rank], env.outer
    return rank


def rebuilt(failure: Failure, rank: int = 0) -> Exception:
    """The error of ``rank`` as the nearest base class that this process knows and that takes one string.

    >>> rebuilt(described(KeyError("t")), 1)
    LookupError("rank 1: KeyError: 't'")
    """
    prefix = f"rank {rank}: " if failure.rank is None else ""
    error = _of_class(failure, prefix)
    setattr(error, _RANK, rank if failure.rank is None else failure.rank)
    return error


def _of_class(failure: Failure, prefix: str) -> Exception:
    for number, (module, name) in enumerate(failure.classes):
        text = f"{prefix}{failure.text}" if not number else f"{prefix}{failure.classes[0][1]}: {failure.text}"
        kind = getattr(builtins if module == "builtins" else sys.modules.get(module), name, None)
        if not (isinstance(kind, type) and issubclass(kind, Exception)) or kind is Exception:
            continue
        try:
            error = kind(text)
            readable = str(error) == text
        except Exception:  # a class that takes other arguments, or changes the text
            continue
        if readable:
            if isinstance(error, OSError):
                error.errno = failure.errno
            return error
    return RuntimeError(f"{prefix}{failure.classes[0][1]}: {failure.text}")
