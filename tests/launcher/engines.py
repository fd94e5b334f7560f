"""What two ranks do, whatever engine starts them."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from recshard_lab.launcher import RankError, Ranks, RanksInterrupted
from tests.launcher.waiting import interrupt, then


def check_work(ranks: Ranks, capsys: pytest.CaptureFixture[str]) -> None:
    """Functions, cells, output and values work as with forked ranks."""
    assert ranks.run(lambda x: x + dist.get_rank(), 10) == [10, 11]
    assert ranks.run(torch.get_num_threads) == [1, 1]
    capsys.readouterr()
    ranks.exec("import sys\nprint('rank', rank); print('both'); print('oh', file=sys.stderr); display(7)")
    out, err = capsys.readouterr()
    assert sorted(out.splitlines()) == ["[0] rank 0", "[1] rank 1", "[all] 7", "[all] both"]
    assert err == "[all] oh\n"
    sent = torch.arange(2_000_000)  # 16 MB, many chunks
    ranks.push({"big": sent}, ranks=[1])
    assert torch.equal(ranks.eval("big + 1", ranks=[1])[0], sent + 1)
    assert [status.state for status in ranks.status()] == ["idle", "idle"]
    assert min(status.memory_bytes for status in ranks.status()) > 50 << 20


def check_stops(ranks: Ranks) -> None:
    """Stops and errors free collectives, and keep variables."""
    ranks.exec("import time; kept = rank")
    with pytest.raises(RanksInterrupted):
        ranks.exec(f"{then(ranks, interrupt)}if rank: dist.barrier()\nelse: time.sleep(60)")
    with pytest.raises(RankError, match=r"rank 1 raised ValueError: boom; rank 0 was waiting in a collective"):
        ranks.exec("if rank == 1: raise ValueError('boom')\ndist.barrier()")
    ranks.exec("pair = dist.new_group([0, 1]); t = torch.ones(1); dist.all_reduce(t, group=pair)")
    assert ranks.eval("t.item(), kept") == [(2.0, 0), (2.0, 1)]
