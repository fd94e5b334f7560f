"""The doctor on real ranks: who has not entered which collective, and where everybody is instead."""

from __future__ import annotations

import re

import pytest
import torch.distributed as dist

from recshard_lab.launcher import RankError, Ranks
from recshard_lab.launcher.collectives import Entered, Line, Position, Window
from recshard_lab.launcher.engines.fork import forkserver
from recshard_lab.launcher.hangs import card, diagnose, disagreeing
from tests.patience import scaled

pytestmark = pytest.mark.timeout(60)

PAIR = {"0": [0, 1]}


@pytest.fixture(scope="module", autouse=True)
def _warm() -> None:
    """Ranks import torch's own modules before they know lines. Forks of a warm forkserver have imported them."""
    assert forkserver().warmed.wait(scaled(50))


def spent(ranks: Ranks, source: str, capsys: pytest.CaptureFixture[str], timeout_s: float = 1.0) -> str:
    """Runs a cell that hangs; what was shown meanwhile."""
    capsys.readouterr()
    with pytest.raises(RankError, match="time limit"):
        ranks.exec(source, filename="<cell [7]>", timeout_s=timeout_s)
    return capsys.readouterr().err


def test_a_rank_that_skips_a_collective_is_named_with_its_line_and_that_of_the_others(
    ranks: Ranks, capsys: pytest.CaptureFixture[str]
) -> None:
    cell = "import time\nt = torch.zeros(4096, dtype=torch.int64)\nif rank != 1:\n    dist.all_reduce(t)\n"
    shown = spent(ranks, f"{cell}else:\n    time.sleep(60)", capsys)
    assert re.search(r"rank 1 never entered all_reduce #2, int64\[4096\]; it is at cell \[7\] line 6: time", shown)
    for rank in (0, 2):
        assert f"rank {rank}: waits in all_reduce #2, int64[4096] at cell [7] line 4" in shown
    assert ranks.run(dist.get_rank) == [0, 1, 2]


def test_a_rank_that_calls_another_operation_is_named(ranks: Ranks, capsys: pytest.CaptureFixture[str]) -> None:
    shown = spent(
        ranks,
        "t = torch.ones(8)\nif rank == 0: dist.all_gather([torch.empty(8) for _ in range(3)], t)\n"
        "else: dist.all_reduce(t)\nif rank: dist.barrier()\nelse: import time; time.sleep(60)",
        capsys,
        timeout_s=1.5,
    )
    assert "rank 0 entered all_gather #2, float32[8]" in shown
    assert "ranks 1, 2 entered all_reduce #2, float32[8]" in shown


def test_sizes_that_differ_are_shown_even_when_the_cell_returns(
    ranks: Ranks, capsys: pytest.CaptureFixture[str]
) -> None:
    ranks.exec("dist.broadcast(torch.ones(4 if rank == 0 else 8), 0)", filename="<cell [3]>")
    shown = capsys.readouterr().err
    assert "rank 0 entered broadcast #2, float32[4], ranks 1, 2 entered broadcast #2, float32[8]" in shown
    assert "cell [3] line 1" in shown


def test_a_skipped_collective_that_nobody_waited_for_is_told_before_the_next_cell_hangs(
    ranks: Ranks, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    ranks.exec("t = torch.ones(4)\nif rank == 0: work = dist.all_reduce(t, async_op=True)", filename="<cell [2]>")
    shown = capsys.readouterr().err
    assert "ranks 1, 2 never entered all_reduce #2, float32[4]" in shown
    assert "rank 0: waits in all_reduce #2, float32[4] at cell [2] line 2" in shown
    ranks.exec("1")
    assert capsys.readouterr().err == ""  # said once
    ranks.exec("if rank: dist.all_reduce(t)\nelse: work.wait()")
    assert ranks.eval("t.tolist()") == [[3.0] * 4] * 3
    ranks.exec("dist.barrier()")
    assert capsys.readouterr().err == ""


@pytest.mark.gate
def test_a_stalled_cell_is_told_while_it_hangs_and_once(ranks: Ranks, capsys: pytest.CaptureFixture[str]) -> None:
    shown = spent(ranks, "import time\nif rank: dist.barrier()\nelse:\n    time.sleep(60)", capsys, timeout_s=6)
    assert "No rank has made progress for 3 s" in shown
    assert shown.count("rank 0 never entered barrier #2; it is at cell [7] line 4: time.sleep(60)") == 1


def test_groups_are_told_apart_and_counted_again_after_they_were_rebuilt(
    ranks: Ranks, capsys: pytest.CaptureFixture[str]
) -> None:
    ranks.exec("pair = dist.new_group([0, 2])")
    for _ in range(2):
        shown = spent(ranks, "if rank == 2: dist.barrier(group=pair)", capsys, timeout_s=0.5)
        assert re.search(r"rank 0 never entered barrier #1 of the group of ranks 0, 2", shown)
    ranks.exec("dist.barrier()\nif rank != 1: dist.barrier(group=pair)")
    assert capsys.readouterr().err == ""


def test_collectives_of_models_count_too(ranks: Ranks, capsys: pytest.CaptureFixture[str]) -> None:
    ranks.exec("ddp = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1)); x = torch.ones(4, 2)")
    shown = spent(ranks, "loss = ddp(x).sum()\nif rank:\n    loss.backward()", capsys, timeout_s=1.5)
    assert re.search(r"rank 0 never entered all_reduce #\d+, float32\[3\]; it has finished the cell", shown)


def test_cells_whose_collectives_pair_up_say_nothing(ranks: Ranks, capsys: pytest.CaptureFixture[str]) -> None:
    ranks.exec("for n in range(600): dist.all_reduce(torch.ones(n % 7 + 1))")  # more than the recorder's ring
    ranks.exec(
        "box = [None] * 3\ndist.all_gather_object(box, 'x' * rank)\n"
        "dist.gather(torch.ones(2), [torch.empty(2) for _ in range(3)] if rank == 0 else None)\n"
        "dist.all_to_all_single(torch.empty(3), torch.ones(3))"
    )
    ranks.exec("if rank == 0: dist.send(torch.ones(1), 1)\nif rank == 1: dist.recv(torch.ones(1), 0)")
    ranks.exec("dist.barrier()")
    assert capsys.readouterr().err == ""


def test_what_is_found_reads_well_without_ranks() -> None:
    entered = Entered("all_to_all", 12, ("Long",), ((4096,),), Line("<cell [7]>", 9, ""), done=False)
    positions = {
        0: Position(5, Line("<cell [7]>", 9, "x"), PAIR, {"0": (entered,)}),
        1: Position(5, Line("<cell [7]>", 3, "a < b"), PAIR, {"0": (entered._replace(number=11, done=True),)}),
    }
    (finding,) = diagnose(positions)
    assert finding.missing == (1,)
    bundle = card([finding], positions, "title", "advice")
    assert "rank 1 never entered all_to_all #12, int64[4096]; it is at cell [7] line 3: a < b" in bundle["text/plain"]
    assert "a &lt; b" in bundle["text/html"]


def test_counts_and_digests_are_compared_only_where_they_can_be() -> None:
    members = {0: PAIR, 1: PAIR}
    same, more, other = Window(0, 3, "a"), Window(3, 4, "b"), Window(0, 3, "c")
    assert not disagreeing(members, {0: {"0": same}, 1: {"0": same}})
    assert disagreeing(members, {0: {"0": same}, 1: {"0": more}})
    assert disagreeing(members, {0: {"0": same}, 1: {"0": other}})
    assert not disagreeing(members, {0: {"0": same}, 1: {"0": Window(2, 3, "d")}})  # one ran an extra cell
    assert not disagreeing({0: PAIR, 1: {}}, {0: {"0": same}, 1: {}})  # a group that one rank has destroyed


SILENT = """
import threading
from recshard_lab.launcher import groups
arrived, cut = threading.Event(), groups.cut

def silent(chosen):
    count = cut(chosen)
    arrived.set()
    return count

groups.cut, groups.uses_nccl = silent, lambda: True
"""


def test_a_rank_that_waits_for_a_gpu_does_not_continue_when_another_fails(ranks: Ranks) -> None:
    """NCCL's abort ends the wait of the host without an error, as this event does."""
    ranks.exec(SILENT)
    with pytest.raises(RankError, match=r"rank 1 raised ValueError: mine; ranks 0, 2 were interrupted"):
        ranks.exec("if rank == 1:\n    raise ValueError('mine')\narrived.wait(60)\nafter = 1")
    assert ranks.eval("'after' in globals()") == [False] * 3
