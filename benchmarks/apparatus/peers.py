"""The cells of each launcher: start four ranks up to a first all_reduce, run an empty cell, idle.

Every recipe starts in a notebook that has imported torch and the launcher. Its cells follow the launcher's
documentation, with two exceptions. Rendezvous uses a file if the launcher leaves it to the user. nbdistributed reports
that it is ready while its ranks still import torch, and loses messages until then: its recipe retries until all answer.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["RANKS", "RECIPES", "Recipe"]

RANKS = 4


@dataclass(frozen=True)
class Recipe:
    """One launcher.

    name: as figures call it. package: what pip installs, empty for ours. prelude: a cell before the clock starts.
    launch: the cell that is timed; it must print ``sum 4.0``. cell: an empty cell on all ranks, empty where
    ranks are not kept for a next one.
    """

    name: str
    package: str
    prelude: str
    launch: str
    cell: str


_ALL_REDUCE = "t = torch.ones(1); dist.all_reduce(t); print('sum %.1f' % t.item())"

_SPAWN = f"""
context = multiprocess.get_context("spawn")

def work(rank, path, sums, leave):
    import torch
    import torch.distributed as dist
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method="file://" + path, rank=rank, world_size={RANKS})
    t = torch.ones(1)
    dist.all_reduce(t)
    sums.put(t.item())
    leave.wait()

sums, leave = context.Queue(), context.Event()
path = tempfile.mktemp()
ranks = [context.Process(target=work, args=(r, path, sums, leave), daemon=True) for r in range({RANKS})]
for rank in ranks:
    rank.start()
print("sum", min(sums.get(timeout=100) for _ in ranks))
"""

_IPYPARALLEL = f"""
cluster = ipyparallel.Cluster(n={RANKS}, log_level=40)
client = cluster.start_and_connect_sync(activate=True)
client[:].scatter("rank", range({RANKS}), flatten=True, block=True)
client[:].push(dict(path="file://" + tempfile.mktemp()), block=True)
get_ipython().run_cell_magic("px", "", '''
import torch
import torch.distributed as dist
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method=path, rank=rank, world_size={RANKS})
t = torch.ones(1)
dist.all_reduce(t)
total = t.item()
''')
print("sum", min(client[:].pull("total", block=True)))
"""

_NBDISTRIBUTED = f"""
shell = get_ipython()
shell.run_line_magic("dist_init", "-n {RANKS}")
wire = shell.magics_manager.registry["DistributedMagic"]._comm_manager
for _ in range(400):
    try:
        wire.send_to_all("get_status", dict(), timeout=0.25)
        break
    except TimeoutError:
        pass
shell.run_cell_magic("distributed", "", "{_ALL_REDUCE}")
"""

_WARM = f"""%load_ext recshard_lab
from recshard_lab.launcher.engines.fork import forkserver
forkserver().warmed.wait(120)
%recshard_launch -n {RANKS}
%recshard_stop"""

_OURS = f"%recshard_launch -n {RANKS}\nget_ipython().run_cell_magic('recshard', '', \"{_ALL_REDUCE}\")"

RECIPES = (
    Recipe("recshard, warm", "", f"import torch\n{_WARM}", _OURS, "%%recshard\npass"),
    Recipe("recshard, cold", "", "import torch, recshard_lab.launcher", f"%load_ext recshard_lab\n{_OURS}", ""),
    Recipe("multiprocess spawn", "multiprocess==0.70.19", "import torch, tempfile, multiprocess", _SPAWN, ""),
    Recipe("ipyparallel", "ipyparallel==9.2.0", "import torch, tempfile, ipyparallel", _IPYPARALLEL, "%%px\npass"),
    Recipe(
        "nbdistributed",
        "nbdistributed==0.1.0",
        "import torch\n%load_ext nbdistributed",
        _NBDISTRIBUTED,
        "%%distributed\npass",
    ),
)
