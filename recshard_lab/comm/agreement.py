"""Agreement between ranks: an error on one rank is raised on all of them, and names the rank.

Without it, the rank that raises leaves while the others wait in the next collective. All four functions are collective.
They exchange one small message over the group's CPU connections, and a second one only if something is wrong.
"""

import re
from collections.abc import Callable, Mapping
from hashlib import blake2b
from typing import Any, NoReturn, TypeVar

import torch

from recshard_lab.comm.collectives import all_gather_object, broadcast_object
from recshard_lab.comm.env import ShardingEnv, message_device
from recshard_lab.comm.errors import Failure, described, rebuilt
from recshard_lab.comm.lost_ranks import issue_and_wait

T = TypeVar("T")
_MAX_CHARS = 200  # of a value in an error
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


def agreed(env: ShardingEnv, action: Callable[[], T]) -> T:
    """Runs ``action`` on every rank and returns this rank's result.

    Args:
        env: the ranks; all of them must call.
        action: local work. It may contain collectives if these agree about their errors themselves.

    Raises:
        Exception: if ``action`` raises on any rank, all ranks raise the error of the first of these ranks: the same
            type (or its nearest base class that takes one string), and the message after ``rank 3:``, for example. If
            all ranks raise the same message, each raises its own error. A single process raises the error itself.

    >>> agreed(ShardingEnv.from_local(1, 0), lambda: 3)
    3
    """
    error, failed = None, torch.zeros(1, dtype=torch.int32, device=message_device(env))
    try:
        result = action()
    except Exception as caught:
        error = caught
        failed.fill_(1)
    issue_and_wait(lambda wire: wire.all_reduce(failed), failed.device, env, "agreement")
    if failed.item():
        raise_first_error(error, env)
    return result


def raise_first_error(error: Exception | None, env: ShardingEnv) -> NoReturn:
    """Raises on every rank the error of the first rank that has one. For ranks that know that one of them failed.

    Args:
        error: of this rank, if it failed.
        env: the ranks; all of them must call.

    Raises:
        Exception: as `agreed`.
    """
    failures: list[Failure | None] = all_gather_object(None if error is None else described(error), env)
    if error is not None and len(set(failures)) == 1:
        raise error
    rank, failure = next((rank, failure) for rank, failure in enumerate(failures) if failure is not None)
    raise rebuilt(failure, env.world_ranks[rank]) from error


def gathered(env: ShardingEnv, action: Callable[[], T]) -> list[T]:
    """Runs ``action`` on every rank and returns the results of all ranks, in the order of the ranks.

    Args:
        env: the ranks; all of them must call.
        action: local work; its result must be picklable.

    Raises:
        Exception: as `agreed`.

    >>> gathered(ShardingEnv.from_local(1, 0), lambda: "a")
    ['a']
    """
    return all_gather_object(agreed(env, action), env)


def from_first_rank(env: ShardingEnv, action: Callable[[], T]) -> T:
    """Runs ``action`` on rank 0 and returns its result on every rank.

    Args:
        env: the ranks; all of them must call.
        action: local work; its result must be picklable.

    Raises:
        Exception: if ``action`` raises, all ranks raise its error, as `agreed` does.

    >>> from_first_rank(ShardingEnv.from_local(1, 0), lambda: [1, 2])
    [1, 2]
    """
    result: T = broadcast_object(agreed(env, lambda: action() if env.rank == 0 else None), env)
    return result


def refuse_differences(
    env: ShardingEnv, facts: Mapping[str, Mapping[str, Any]], error: type[Exception] = ValueError, after: str = ""
) -> None:
    """Raises on every rank if the ranks pass different facts. Values are compared by ``repr``, without addresses.

    Args:
        env: the ranks; all of them must call.
        facts: values to compare, such as ``"plan"`` -> name -> value; names appear in the error.
        error: the type to raise.
        after: a sentence for the error, such as ``"Nothing was moved. "``.

    Raises:
        Exception: ``error``, which names the first rank that differs from rank 0, and the first fact.
    """
    local = {
        (section, name): _ADDRESS.sub("", repr(value))
        for section, named in facts.items()
        for name, value in named.items()
    }
    digest = blake2b(repr(sorted(local.items())).encode(), digest_size=16).digest()
    if len(set(all_gather_object(digest, env))) == 1:
        return
    by_rank: list[dict[tuple[str, str], str]] = all_gather_object(local, env)
    for rank, remote in enumerate(by_rank):
        for section, name in [*by_rank[0], *remote] if remote != by_rank[0] else ():
            first, other = (values.get((section, name), "nothing") for values in (by_rank[0], remote))
            if first != other:
                raise error(
                    f"the ranks disagree about the {section}: {name} is {first:.{_MAX_CHARS}} on rank 0 and "
                    f"{other:.{_MAX_CHARS}} on rank {rank}. {after}Fix: pass the same {section} on every rank."
                )
