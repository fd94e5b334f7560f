"""Counters of living ranks: equal to an independent count, read while the ranks compute, and never in their way."""

from __future__ import annotations

import re
import threading
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from recshard_lab.lab import LiveCounters, read_counters, unwatch_counters, views, watch_counters
from recshard_lab.lab.live.row_cache import RowCache
from recshard_lab.lab.live.samples import Sample
from recshard_lab.launcher import LaunchError, RankError, Ranks
from tests.launched import launched
from tests.patience import wait_until

MODEL = """
import numpy as np
import torch
import recshard_lab as rs
from recshard_lab.lab.compare.measure import random_batch
from recshard_lab.sharding import ShardingPlan, scheme_named
torch.manual_seed(0)
rows = {"movie": 120, "user": 60, "genre": 18, "tag": 40}
tables = [rs.EmbeddingBagConfig(name=n, num_embeddings=r, embedding_dim=8, feature_names=["f_" + n])
          for n, r in rows.items()]
schemes = {"movie": "row_wise", "genre": "data_parallel", "tag": "column_wise"}
def lies(table):
    if table.name != "user":
        return scheme_named(schemes[table.name]).default(table, rs.Topology(world_size))
    return rs.ParameterSharding("row_wise", shards=[rs.Shard(0, (0, 20), (0, 8)), rs.Shard(1, (20, 60), (0, 8), "ddr")])
plan = ShardingPlan({"": {table.name: lies(table) for table in tables}})
sharder = rs.distributed.EmbeddingBagCollectionSharder(fused_params={"optimizer": OPTIMIZER, "learning_rate": 0.05})
model = rs.DistributedModelParallel(rs.EmbeddingBagCollection(tables), plan=plan, sharders=[sharder])
rng = np.random.default_rng(rank)
ids = {table.name: [] for table in tables}
def train_step():
    batch = random_batch(tables, rs.Workload(6, 2.0, zipf_alpha=0.8), rng)
    for table in tables:
        ids[table.name].append(batch["f_" + table.name].values().numpy())
    loss = (model(batch).values() - 1).square().mean()
    loss.backward()
    return loss
"""
NORMS = """
states = model.fused_optimizer.state_dict()["state"]
def whole(value):
    if not hasattr(value, "local_shards"):
        return value
    told = [None] * world_size
    dist.all_gather_object(told, [one.tensor for one in value.local_shards()])
    return torch.cat([one.reshape(-1) for own in told for one in own])
norms = {
    key.split(".")[1]: {name: float(whole(value).double().norm()) for name, value in own.items()}
    for key, own in states.items()
}
"""


ranks = launched(2)


def model_on(ranks: Ranks, optimizer: str = "exact_row_wise_adagrad") -> None:
    ranks.push({"OPTIMIZER": optimizer})
    ranks.exec(MODEL)


@pytest.fixture
def widget(ranks: Ranks) -> Iterator[LiveCounters]:
    model_on(ranks)
    made = LiveCounters(ranks, every_s=0.02, cache_rows=16)
    yield made
    made.close()


def newest(ranks: Ranks) -> Sample:
    found = read_counters(ranks)
    assert found is not None
    return found


@pytest.mark.gate
@pytest.mark.parametrize("optimizer", ["exact_sgd", "exact_row_wise_adagrad", "adam"])
def test_what_is_counted_is_what_was_looked_up_and_stepped(ranks: Ranks, optimizer: str) -> None:
    model_on(ranks, optimizer)
    first = watch_counters(ranks, every_s=0.0)
    assert first.step == 0
    assert not any(first.table(name).lookups() for name in first.names)
    ranks.exec("for _ in range(7): train_step()")
    found = newest(ranks)
    assert found.step == 7
    drawn = {name: np.concatenate([i for one in ranks.pull("ids") for i in one[name]]) for name in found.names}
    movie, user, genre, tag = (found.table(name) for name in ("movie", "user", "genre", "tag"))
    assert movie.lookups() == len(drawn["movie"])
    assert found.table("movie", 1).lookups() == (drawn["movie"] >= 60).sum()
    assert movie.touched_share == len(np.unique(drawn["movie"])) / 120
    assert user.lookups("ddr") == (drawn["user"] >= 20).sum()
    assert user.fast_share == pytest.approx((drawn["user"] < 20).mean())
    assert movie.fast_share is None
    assert genre.lookups("replica") == genre.lookups() == len(drawn["genre"])
    assert tag.lookups() == 2 * len(drawn["tag"])  # every piece of its columns is asked
    whole = ranks.eval("model.full_state_dict()")[0]
    for name in found.names:
        truth = float(whole[f"embedding_bags.{name}.weight"].double().norm())
        assert found.table(name).weight_norm == pytest.approx(truth, rel=1e-9)
    copies = [found.table("genre", rank).weight_norm for rank in range(2)]  # each rank holds all of it
    assert copies == pytest.approx([genre.weight_norm] * 2)
    held = ranks.eval("model.memory_bytes()['optimizer_state']")
    counts = 8 * len(found.names) * 2 if optimizer == "adam" else 0  # `iter`, on both ranks where a piece lies
    told = sum(found.table(name).state("bytes") for name in found.names)
    assert told == pytest.approx(sum(held), abs=counts)
    ranks.exec(NORMS)
    for name, expected in ranks.pull("norms")[0].items():
        norms = [value for state, value in expected.items() if not state.endswith("iter")]
        norm = found.table(name).state_norm
        assert (norm or 0.0) == pytest.approx(float(np.sqrt(np.square(norms).sum())), rel=1e-6)
    assert movie.steps == (7 if optimizer == "adam" else None)
    if optimizer != "exact_sgd":
        assert movie.state("rows", movie.state_names[0]) == len(np.unique(drawn["movie"]))


class _Reference:
    """The same cache with a dictionary in order of use."""

    def __init__(self, capacity: int) -> None:
        self.capacity, self.counts = capacity, [0, 0, 0]
        self.rows: OrderedDict[int, None] = OrderedDict()

    def use(self, ids: list[int]) -> None:
        self.counts[0] += sum(row in self.rows for row in ids)
        self.counts[1] += sum(row not in self.rows for row in ids)
        used = sorted(set(ids))
        new = [row for row in used if row not in self.rows]
        for row in new:
            if len(self.rows) >= self.capacity:
                oldest = next((old for old in self.rows if old not in used), None)
                if oldest is None:
                    break
                del self.rows[oldest]
                self.counts[2] += 1
            self.rows[row] = None
        for row in used:
            if row in self.rows:
                self.rows.move_to_end(row)


@given(st.integers(1, 9), st.lists(st.lists(st.integers(0, 11), max_size=12), max_size=12))
def test_the_reckoned_cache_drops_what_was_used_longest_ago(capacity: int, batches: list[list[int]]) -> None:
    cache, truth = RowCache(12, capacity), _Reference(capacity)
    for batch in batches:
        cache.use(np.array(batch, dtype=np.int64))
        truth.use(batch)
        assert len(cache.held_rows) == len(set(cache.held_rows.tolist())) <= capacity
        assert [cache.hits, cache.misses, cache.evictions] == truth.counts
        assert set(cache.held_rows.tolist()) == set(truth.rows)


def test_the_cache_reckoned_on_ranks_is_that_of_the_ids_they_looked_up(ranks: Ranks) -> None:
    model_on(ranks)
    watch_counters(ranks, cache_rows=16)
    ranks.exec("for _ in range(6): train_step()")
    found = newest(ranks).table("movie")
    drawn = ranks.eval("ids['movie']")
    hits = evicted = 0
    for rank in range(2):
        truth = _Reference(16)
        for step in range(6):
            batch = np.concatenate([drawn[0][step], drawn[1][step]])
            truth.use([int(row) % 60 for row in batch if row // 60 == rank])
        hits, evicted = hits + truth.counts[0], evicted + truth.counts[2]
    assert (found.cache("hits"), found.cache("evictions")) == (hits, evicted)
    assert hits > 0
    assert evicted > 0


def test_it_follows_a_running_cell_and_never_stands_in_the_way(
    ranks: Ranks, widget: LiveCounters, tmp_path: Path
) -> None:
    steps = "import pathlib, time\nfor _ in range(150): train_step()\n"
    wait = f"while not pathlib.Path({str(tmp_path / 'go')!r}).exists(): time.sleep(0.01)"
    work = threading.Thread(target=lambda: ranks.exec(steps.replace("()", "(); time.sleep(0.005)") + wait))
    work.start()
    wait_until(lambda: len(widget.history) > 4)
    assert work.is_alive()
    widget.refresh()  # it waits for no step
    assert work.is_alive()
    (tmp_path / "go").touch()
    work.join()
    for _ in range(20):
        ranks.exec("train_step()")  # the widget looks all the time, and no cell is told that ranks are busy
    wait_until(lambda: 'data-step="170"' in widget.picture.value)
    steps = [sample.step for sample in widget.history]
    assert steps == sorted(steps)
    shares = [sample.table("movie").hit_share for sample in widget.history if sample.step]
    assert shares[-1] > shares[0]  # type: ignore[operator]  # the cache has warmed up
    lookups = f"{sum(len(i) for one in ranks.pull('ids') for i in one['movie']):,}"
    assert re.search(rf">lookups: [^<]*\b{lookups}\b", widget.picture.value)


def test_a_model_that_moves_is_counted_on_and_rows_are_those_that_lie_there(ranks: Ranks) -> None:
    model_on(ranks)
    watch_counters(ranks, every_s=0.0, cache_rows=8)
    ranks.exec("for _ in range(3): train_step()")
    before = newest(ranks).table("movie")
    ranks.exec(
        "moved = ShardingPlan({'': {'movie': scheme_named('table_wise').default(tables[0], rs.Topology(2), [1])}})\n"
        "model.reshard(moved)"
    )
    after = newest(ranks)
    assert after.table("movie").lookups() == before.lookups()
    assert after.table("movie").cache("hits") == before.cache("hits")
    assert after.table("movie").touched_share == 0
    assert after.table("movie").weight_norm == pytest.approx(before.weight_norm, rel=1e-12)
    ranks.exec("for _ in range(3): train_step()")
    drawn = np.concatenate([i for one in ranks.pull("ids") for i in one["movie"]])
    found = newest(ranks)
    assert found.table("movie").lookups() == len(drawn)
    first = np.concatenate([i for one in ranks.pull("ids") for i in one["movie"][:3]])
    assert found.table("movie", 0).lookups() == (first < 60).sum()


def test_a_dynamic_table_reports_its_slots_and_what_its_index_counts(ranks: Ranks) -> None:
    ranks.exec(
        "import torch\nimport recshard_lab as rs\n"
        "config = rs.DynamicEmbeddingConfig('user', 8, capacity=1024, evict='lfu')\n"
        "users = rs.DynamicEmbeddingBagCollection([config], rs.optim.RowWiseAdagrad, {'lr': 0.1})\n"
        "model = rs.DistributedModelParallel(users,\n"
        "    plan=rs.ShardingPlan({'': {'user': rs.ParameterSharding('row_wise')}}))\n"
        "def step(first, many):\n"
        "    ids = torch.arange(first, first + many) * 10**12 - 5\n"
        "    batch = rs.KeyedJaggedTensor(['user'], ids, lengths=torch.ones_like(ids))\n"
        "    model(batch).values().sum().backward()\n"
    )
    watch_counters(ranks, cache_rows=16)
    ranks.exec("step(300 * rank, 300)")
    found = newest(ranks).table("user")
    assert (found.slots, found.load_factor, found.hit_share, found.evictions) == (1024, 600 / 1024, 0, 0)
    assert (found.touched_share, found.lookups(), found.state_names) == (None, 600, ["momentum1"])
    ranks.exec("step(300 * rank, 300)\nstep(600 + 300 * rank, 300)")
    found = newest(ranks).table("user")
    assert found.hit_share == 600 / 1800
    assert found.counted["inserts"] - found.evictions == found.counted["slots_in_use"] <= 1024
    assert found.evictions > 0
    view = views.counters([newest(ranks)])
    assert "slots in use" in view.svg
    assert "evicted" in view.svg


def test_a_cached_table_reports_what_its_cache_counts(ranks: Ranks) -> None:
    ranks.exec(
        "import torch\nimport recshard_lab as rs\n"
        "movies = rs.EmbeddingBagCollection([rs.EmbeddingBagConfig(4000, 8, 'movies', feature_names=['seen'])])\n"
        "cache = rs.sharding.CacheParams(load_factor=0.1)\n"
        "entry = rs.ParameterSharding('row_wise', 'fused_uvm_caching', cache_params=cache)\n"
        "fused = {'optimizer': 'exact_row_wise_adagrad', 'learning_rate': 0.1}\n"
        "sharder = rs.distributed.EmbeddingBagCollectionSharder(fused)\n"
        "model = rs.DistributedModelParallel(\n"
        "    movies, plan=rs.ShardingPlan({'': {'movies': entry}}), sharders=[sharder])\n"
        "def step(first):\n"
        "    ids = torch.arange(first, first + 200) * 10\n"
        "    batch = rs.KeyedJaggedTensor(['seen'], ids, lengths=torch.ones_like(ids))\n"
        "    model(batch).values().sum().backward()\n"
    )
    watch_counters(ranks, every_s=1e6, cache_rows=16)
    ranks.exec("step(0)\nstep(200 * rank)")
    found = newest(ranks).table("movies")
    assert (found.slots, found.fast_share, found.cache("hits")) == (512, None, None)
    assert found.lookups() == found.lookups("cache") == 800
    assert found.hit_share == found.counted["hits"] / 800
    assert found.counted["admissions"] - found.evictions == found.counted["slots_in_use"]
    assert found.a_step("misses") == found.counted["misses"] / 2
    before = found.counted
    ranks.exec("step(100)")
    found = newest(ranks).table("movies")
    for name in ("hits", "misses", "admissions", "evictions"):
        assert found.a_step(name) == found.counted[name] - before[name]
    view = views.counters([newest(ranks)])
    assert "misses/step" in view.svg
    assert "of lookups hit one of 512 slots" in view.svg
    assert "no row is cached" not in view.svg


def test_ids_that_are_no_rows_are_counted_by_table(ranks: Ranks) -> None:
    model_on(ranks)
    ranks.exec(
        "model = rs.DistributedModelParallel(rs.EmbeddingBagCollection(tables), plan=plan,\n"
        "    sharders=[rs.distributed.EmbeddingBagCollectionSharder(out_of_range='ignore')])\n"
        "batch = random_batch(tables, rs.Workload(6, 2.0), rng)\n"
        "batch.values()[:3] = 10_000\n"
    )
    watch_counters(ranks)
    ranks.exec("model(batch)")
    assert newest(ranks).table("movie").out_of_range == 6  # three ids of each rank's batch
    assert newest(ranks).table("user").out_of_range == 0


def test_a_model_or_ranks_that_are_gone_are_told(
    ranks: Ranks, widget: LiveCounters, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("recshard_lab.lab.widgets.live_counters.current", lambda: None)
    with pytest.raises(LaunchError, match="no ranks are running"):
        LiveCounters()
    for ask in (read_counters, watch_counters, unwatch_counters):
        with pytest.raises(ValueError, match=r"ranks must be a launched session, got None.*ranks = launch\(2\)"):
            ask(None)
    with pytest.raises(RankError, match="nothing_there"):
        watch_counters(ranks, "nothing_there")
    ranks.exec("del model; import gc; gc.collect()")
    widget.refresh()
    assert "is gone from the ranks, or is not watched any more" in widget.message.value
    assert read_counters(ranks) is None
    for wrong in ({"every_s": -1}, {"cache_rows": -1}, {"cache_rows": 1.5}, {"model": 3}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            watch_counters(ranks, **wrong)  # type: ignore[arg-type]


def one(name: str = "movie", **more: Any) -> dict[str, Any]:
    state = {"momentum1": {"bytes": 40, "squares": 4.0, "held_squares": 4.0, "rows": 3}}
    known = {
        "lookups": {"hbm": 30},
        "rows": 10,
        "states": state,
        "weights": {"bytes": 4, "squares": 9.0, "held_squares": 9.0},
    }
    return {name: {**known, "touched_rows": 5, "rows_here": 10, **more}}
