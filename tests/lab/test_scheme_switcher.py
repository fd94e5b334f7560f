"""SchemeSwitcher on real ranks: what it predicts, what it applies, and its proof that nothing else changed."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest

from recshard_lab.lab import LiveModel, SchemeSwitcher
from recshard_lab.lab.widgets.components import SplitLines
from recshard_lab.launcher import RankError, Ranks
from recshard_lab.planner import Workload, estimate
from recshard_lab.sharding import ParameterSharding, PlanError, Shard, ShardingPlan, Topology, scheme_names
from tests.launched import launched
from tests.patience import wait_until

pytestmark = pytest.mark.gate

MODEL = """
import torch
import recshard_lab as rs
from recshard_lab.lab.compare.measure import random_batch
import numpy as np
torch.manual_seed(0)
tables = [
    rs.EmbeddingBagConfig(name=name, num_embeddings=rows, embedding_dim=16, feature_names=["f_" + name])
    for name, rows in {"movie": 1000, "user": 300, "genre": 19}.items()
]
class Scores(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.tables = rs.EmbeddingBagCollection(tables)
        self.over = torch.nn.Linear(48, 1)
    def forward(self, kjt):
        return self.over(self.tables(kjt).values())
model = rs.DistributedModelParallel(Scores())
dense = torch.optim.SGD(model.dense_parameters(), lr=0.1)
rng = np.random.default_rng(rank)
batch = random_batch(tables, rs.Workload(32, 2.0), rng)
def train_step():
    dense.zero_grad()
    loss = (model(batch) - 1).square().mean()
    loss.backward()
    dense.step()
    return loss
"""


ranks = launched(4, nodes=2)


@pytest.fixture
def switcher(ranks: Ranks) -> Iterator[SchemeSwitcher]:
    ranks.exec(MODEL)
    made = SchemeSwitcher(ranks, "model", "train_step", workload=Workload(32, 2.0))
    yield made
    made.close()


def card(switcher: SchemeSwitcher, side: str) -> dict[str, str]:
    return dict(re.findall(r'data-([\w-]+)="([^"]*)"', switcher.cards[side].value))


@pytest.mark.gate
@pytest.mark.parametrize("scheme", scheme_names())
def test_a_scheme_is_predicted_applied_and_proved(switcher: SchemeSwitcher, scheme: str) -> None:
    switcher.train(2)
    switcher.set(dict.fromkeys(("movie", "user"), scheme))
    assert switcher.plan is not None
    topology = Topology(4, local_world_size=2)
    expected = estimate(switcher.plan, switcher.tables, topology, Workload(32, 2.0)).step_ms
    assert float(card(switcher, "asked")["step-ms"]) == pytest.approx(expected)
    asked = switcher.plan
    before = switcher.live.ranks.eval("model.full_state_dict()")[0]
    proof = switcher.apply()
    after = switcher.live.ranks.eval("model.full_state_dict()")[0]
    assert proof.same
    assert all((before[name] == after[name]).all() for name in before)
    lies = ShardingPlan.from_json(switcher.live.ranks.eval("model.plan.to_json()")[0])
    assert lies == asked == switcher.live.plan
    assert lies.tables()["movie"].sharding_type == scheme
    assert 'data-same="true"' in switcher.badge.value
    assert switcher.train(2)[-1] < switcher.live.losses[0]
    assert float(card(switcher, "live")["measured-ms"]) > 0
    assert switcher.live.switched == [2]


def test_dragged_lines_become_uneven_stripes(switcher: SchemeSwitcher) -> None:
    switcher.split.value = "movie"
    switcher.lines.ends = [100, 100, 900]
    assert switcher.menus["movie"].value == "row_wise"
    assert switcher.plan is not None
    asked = [(s.rank, s.rows) for s in switcher.plan.tables()["movie"].shards]
    assert asked == [(0, (0, 100)), (2, (100, 900)), (3, (900, 1000))]
    assert switcher.apply().same
    assert switcher.live.ranks.eval(
        "sum(w.shape[0] for _, w in model.collections['tables'].table_shards()['movie'].shards())"
    ) == [
        100,
        0,
        800,
        100,
    ]


def test_the_python_under_it_makes_the_same_plan(switcher: SchemeSwitcher) -> None:
    switcher.set({"movie": "column_wise"}, {"user": [10, 20, 200]})
    asked = switcher.plan
    space: dict[str, Any] = {"ranks": switcher.live.ranks}
    exec(switcher.python, space)
    assert space["live"].plan == asked
    assert space["live"].proof.same


def test_training_goes_on_by_itself_and_survives_a_switch(switcher: SchemeSwitcher) -> None:
    assert (switcher.trains.description, switcher.trains.icon) == ("Train", "play")
    switcher.trains.value = True
    assert (switcher.trains.description, switcher.trains.icon) == ("Pause", "pause")
    wait_until(lambda: len(switcher.live.losses) >= 10)
    wait_until(lambda: re.search(r"step \d\d", switcher.steps.value))
    switcher.set({"movie": "row_wise"})
    switcher.button.click()
    wait_until(lambda: switcher.live.switched)
    steps = len(switcher.live.losses)
    wait_until(lambda: len(switcher.live.losses) >= steps + 10)
    switcher.trains.value = False
    assert (switcher.trains.description, switcher.trains.icon) == ("Train", "play")
    wait_until(lambda: f"step {len(switcher.live.losses):,}<" in switcher.steps.value)
    assert switcher.live.proof is not None
    assert switcher.live.proof.same
    assert switcher.live.losses[-1] < switcher.live.losses[0]
    wait_until(lambda: "the plan changed after step" in switcher.curve.value)


def test_train_pressed_several_times_at_once_trains_in_one_chain(switcher: SchemeSwitcher) -> None:
    for _ in range(3):
        switcher.trains.value = False
        switcher.trains.value = True
    wait_until(lambda: len(switcher.live.losses) >= 10)
    assert len(switcher.worker._lanes["ranks"].tasks) <= 1
    switcher.trains.value = False
    wait_until(lambda: not switcher.worker.busy("ranks"))
    switcher.close()
    with pytest.raises(RuntimeError, match="the widget is closed"):
        switcher.train(1)


def test_changes_of_the_plan_are_lines_in_the_loss_curve_once_each(switcher: SchemeSwitcher) -> None:
    switcher.train(2)
    for scheme in ("row_wise", "column_wise"):  # both after step 2
        switcher.set({"movie": scheme})
        switcher.apply()
    switcher.train(2)
    switcher.set({"movie": "row_wise"})
    switcher.apply()
    switcher.train(2)
    assert "Dashed: the plan changed after step 2, 4." in switcher.curve.value
    assert switcher.curve.value.count('stroke-dasharray="4 3"') == 2


def test_a_measurement_ends_with_the_plan_that_it_is_of(switcher: SchemeSwitcher) -> None:
    switcher.train(2)
    assert "measured" in switcher.cards["live"].value
    switcher.picture.value = "memory"
    assert "counted" in switcher.pictures["live"].value
    switcher.set({"movie": "row_wise"})
    assert "measured" not in switcher.cards["asked"].value
    switcher.apply()
    assert "measured" not in switcher.cards["live"].value
    assert "measured" not in switcher.pictures["live"].value


@pytest.mark.clock
def test_a_rank_that_comes_late_is_in_no_step(ranks: Ranks) -> None:
    ranks.exec(MODEL)
    spent = ranks.eval(
        "(__import__('time').sleep(0.6 * (rank == 1)), __import__('recshard_lab.lab.live.on_ranks', fromlist=['live'])"
        ".train_on(model, train_step, 1))[1]['spent'][0]"
    )
    assert max(spent) < 500


def test_a_weight_that_changes_on_the_way_is_noticed(switcher: SchemeSwitcher) -> None:
    """The proof can fail: somebody else trains between the two looks."""
    switcher.live.ranks.exec(
        "was = type(model).reshard\n"
        "def reshard(self, plan, **more):\n"
        "    done = was(self, plan, **more)\n"
        "    for shards in self.collections['tables'].table_shards().values():\n"
        "        for shard, weight in shards.shards():\n"
        "            if shard.rows[0] == 0 and shard.cols[0] == 0:\n"
        "                weight.data[0, 0] += 1e-3\n"
        "    return done\n"
        "type(model).reshard = reshard"
    )
    try:
        switcher.set({"movie": "row_wise"})
        proof = switcher.apply()
    finally:
        switcher.live.ranks.exec("type(model).reshard = was")
    assert not proof.weights_equal
    assert not proof.same
    assert "WEIGHTS DIFFER" in switcher.badge.value


def test_mistakes_are_told(switcher: SchemeSwitcher, ranks: Ranks) -> None:
    with pytest.raises(ValueError, match="unknown table 'film'"):
        switcher.set({"film": "row_wise"})
    with pytest.raises(ValueError, match="unknown scheme 'rowwise'"):
        switcher.set({"movie": "rowwise"})
    with pytest.raises(ValueError, match="must ascend"):
        switcher.set(ends={"movie": [5, 2, 7]})
    with pytest.raises(RankError, match="nobody"):
        LiveModel(ranks, "nobody")
    with pytest.raises(ValueError, match="no training step"):
        LiveModel(ranks).train(1)
    with pytest.raises(ValueError, match="8 ranks"):
        SchemeSwitcher(ranks, topology=Topology(8))
    beyond = ParameterSharding("table_wise", shards=[Shard(9, (0, 1000), (0, 16))])
    with pytest.raises(PlanError, match="rank 9"):
        LiveModel(ranks).reshard(ShardingPlan({"tables": {"movie": beyond}}))  # type: ignore[dict-item]


def test_lines_that_do_not_cut_are_refused() -> None:
    with pytest.raises(ValueError, match="2 ranks"):
        SplitLines("t", 10, [3, 5], [0, 1])
    lines = SplitLines("t", 10, [3], [0, 1])
    lines.show("u", 1000, [300, 400], [0, 1, 2])
    assert (lines.table, lines.ends) == ("u", [300, 400])
