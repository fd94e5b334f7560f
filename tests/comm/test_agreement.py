"""Agreement: what one rank raises, all raise."""

from typing import Any

import torch

from recshard_lab import PlanError
from recshard_lab.comm import agreed, from_first_rank, gathered, refuse_differences
from recshard_lab.distributed import ShardingEnv
from recshard_lab.saved.files import CheckpointError
from tests.launched import launched
from tests.patience import scaled

KINDS: dict[str, tuple[Any, str, str, int | None]] = {
    "plan": (lambda rank: PlanError(f"no plan {rank}"), "PlanError", "no plan 1", None),
    "checkpoint": (lambda _: CheckpointError("damaged"), "CheckpointError", "damaged", None),
    "disk": (
        lambda _: OSError(28, "No space left on device"), "OSError", "[Errno 28] No space left on device", 28
    ),
    "key": (lambda _: KeyError("t"), "LookupError", "KeyError: 't'", None),
    "unicode": (
        lambda _: UnicodeDecodeError("utf-8", b"x", 0, 1, "bad"), "UnicodeError",
        "UnicodeDecodeError: 'utf-8' codec can't decode byte 0x78", None,
    ),
    "odd": (lambda _: _Odd("a", "b"), "ValueError", "_Odd: a and b", None),
    "unreadable": (lambda _: _Unreadable(), "RuntimeError", "_Unreadable: an error without a readable message", None),
    "memory": (lambda _: MemoryError(), "MemoryError", "", None),
}  # fmt: skip


ranks = launched(3)


class _Odd(ValueError):
    """An error that takes two arguments and is known on one rank alone."""

    def __init__(self, one: str, two: str) -> None:
        super().__init__(f"{one} and {two}")


class _Unreadable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


def raised(kind: str, failing: list[int]) -> tuple[str, str, Any, bool]:
    """What an action that raises on some ranks ends in: type, text, errno, and whether the cause is kept."""
    rank = torch.distributed.get_rank()

    def action() -> int:
        if rank in failing:
            raise KINDS[kind][0](rank)
        return rank

    try:
        agreed(ShardingEnv.default(), action)
    except Exception as error:
        return type(error).__name__, str(error), getattr(error, "errno", None), error.__cause__ is not None
    return "", "", None, False


def test_every_rank_raises_the_type_and_text_of_the_first_failing_rank(ranks: Any) -> None:
    for kind, (_, name, text, errno) in KINDS.items():
        for failing in ([1], [1, 2]):
            found = ranks.call(raised, (kind, failing), timeout_s=scaled(60))
            for rank, (other, said, number, caused) in enumerate(found):
                assert (other, said.startswith(f"rank 1: {text}"), number) == (name, True, errno), said
                assert caused == (rank in failing)


def test_the_same_error_on_all_ranks_stays_as_it_is(ranks: Any) -> None:
    found = ranks.call(raised, ("checkpoint", [0, 1, 2]), timeout_s=scaled(60))
    assert found == [("CheckpointError", "damaged", None, False)] * 3


def inside_another() -> list[str]:
    """An agreement among two of three ranks inside one of all three: the rank is named once, by its own number."""
    rank, world = torch.distributed.get_rank(), ShardingEnv.default()
    pair = torch.distributed.new_group([1, 2])

    def failing() -> None:
        if rank == 2:
            raise MemoryError("full")

    def action() -> None:
        if rank:
            agreed(ShardingEnv(2, rank - 1, pair, outer=world, members=(1, 2)), failing)

    try:
        agreed(world, action)
    except MemoryError as error:
        return [str(error)]
    return []


def test_an_agreement_inside_another_names_the_rank_once(ranks: Any) -> None:
    assert ranks.call(inside_another, timeout_s=scaled(60)) == [["rank 2: full"]] * 3


def other_helpers() -> tuple[list[int], Any, list[str]]:
    """Results of `gathered` and `from_first_rank`, and their errors."""
    rank, env = torch.distributed.get_rank(), ShardingEnv.default()
    errors = []

    def first() -> Any:
        if rank == 0:
            raise RuntimeError("broken")

    def last() -> Any:
        if rank == 2:
            raise RuntimeError("broken")

    for helper, action in ((gathered, last), (from_first_rank, first)):
        try:
            helper(env, action)
        except RuntimeError as error:
            errors.append(str(error))
    return gathered(env, lambda: 10 * rank), from_first_rank(env, lambda: {"rank": rank}), errors


def test_results_reach_every_rank_and_so_do_errors(ranks: Any) -> None:
    expected = ([0, 10, 20], {"rank": 0}, ["rank 2: broken", "rank 0: broken"])
    assert ranks.call(other_helpers, timeout_s=scaled(60)) == [expected] * 3


def differing() -> list[str]:
    """Errors about facts that differ on rank 2, are absent there, or differ in an address alone."""
    odd, errors = torch.distributed.get_rank() == 2, []
    mine: list[Any] = [{"rows": 3 + odd}, {} if odd else {"rows": 3}, {"function": lambda: None}]
    for facts in mine:
        try:
            refuse_differences(ShardingEnv.default(), {"model": facts}, PlanError, "Nothing was moved. ")
        except PlanError as error:
            errors.append(str(error))
    return errors


def test_facts_that_differ_are_named_with_both_values(ranks: Any) -> None:
    expected = [
        f"the ranks disagree about the model: rows is 3 on rank 0 and {other} on rank 2. Nothing was moved. "
        f"Fix: pass the same model on every rank."
        for other in ("4", "nothing")
    ]
    assert ranks.call(differing, timeout_s=scaled(60)) == [expected] * 3
