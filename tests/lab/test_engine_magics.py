"""The magics over ranks that do not come from a fork, in a real ipykernel."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.lab.test_magics import Notebook, family, gone

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def notebook() -> Iterator[Notebook]:
    notebook = Notebook()
    notebook.ok("%load_ext recshard_lab")
    yield notebook
    notebook.close()


@pytest.mark.gate
def test_spawned_ranks_answer_the_same_magics(notebook: Notebook) -> None:
    assert "engine spawn ready in" in notebook.ok("%recshard_launch -n 2 --start-method spawn").stdout
    notebook.ok("def twice(x): return 2 * x")
    notebook.ok("%recshard_push twice")
    assert notebook.ok("%%recshard\nprint('hi')\ntwice(rank)").stdout == "[all] hi\n[0] 0\n[1] 2\n"
    number = notebook.send("%%recshard\nprint('go')\nif rank: dist.barrier()\nelse:\n    import time; time.sleep(60)")
    notebook.hear(number, until="go")
    notebook.manager.interrupt_kernel()
    said = notebook.hear(number)
    assert said.name == "RanksInterrupted"
    assert notebook.ok("%%recshard\nt = torch.ones(1); dist.all_reduce(t); t.item()").stdout == "[all] 2.0\n"
    ranks = [process for process in family(notebook.manager.provisioner.pid) if "spawn_main" in str(process.cmdline())]
    assert len(ranks) == 2
    notebook.ok("%recshard_stop")
    assert gone(ranks, within=2)


def test_an_emulated_link_is_called_emulated_wherever_it_is_named(notebook: Notebook) -> None:
    said = notebook.ok("%recshard_launch -n 2 --nodes 2 --inter-node-latency 150 --inter-node-gbps 10").stdout
    assert "on 2 virtual nodes (emulated link between them: 150 ms, 10 Gbit/s a rank)" in said
    assert "The link between nodes is emulated" in said
    assert "emulated" in notebook.ok("%recshard_status").stdout
    cell = "from recshard_lab.comm import ShardingEnv, all_to_all\nfrom time import perf_counter\n"
    cell += "begun = perf_counter(); all_to_all(torch.ones(2), [1, 1], [1, 1], ShardingEnv.default(), 'test')\n"
    cell += "print(0.15 <= perf_counter() - begun)"
    assert notebook.ok("%%recshard\n" + cell).stdout == "[all] True\n"
    notebook.ok("%recshard_stop")
    refused = notebook.run("%recshard_launch -n 2 --inter-node-latency 5")
    assert refused.name == "LaunchError"
    assert "nodes=2" in refused.error
