"""Dynamic tables with tiers below the fast one: rows, optimizer states and scores that come back; counters."""

from __future__ import annotations

import copy
import pickle
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from recshard_lab import DataType, DynamicEmbeddingBagCollection, DynamicEmbeddingCollection, DynamicEmbeddingConfig
from recshard_lab.embedding import EmbOptimType, EmulatedCost, Tier
from recshard_lab.embedding.dynamic.stores import HostStore, RowFormat, Rows, TierError
from recshard_lab.embedding.dynamic.table import DynamicTable, Memory
from recshard_lab.embedding.kernels import KernelInput
from recshard_lab.sparse import KeyedJaggedTensor
from tests.embedding.dynamic.redis_server import redis_server

REDIS = pytest.param("redis", marks=pytest.mark.needs("redis-server"))
KINDS = ["host", "disk", REDIS]
DIM = 4


@pytest.fixture(scope="module")
def redis_url() -> Iterator[str]:
    with redis_server() as url:
        yield url


@pytest.fixture
def tier(tmp_path: Path, request: pytest.FixtureRequest) -> Any:
    """Makes a tier of a kind, empty for each test."""

    def made(kind: str, **more: Any) -> Tier:
        if kind == "redis":
            return Tier(kind, url=request.getfixturevalue("redis_url"), **more)
        where = {"host": {"capacity": 1024}, "disk": {"path": tmp_path}}[kind]
        return Tier(kind, **(where | more))  # type: ignore[arg-type]

    return made


@pytest.fixture
def name(request: pytest.FixtureRequest) -> str:
    """A table's name that no other test uses: tests share the server."""
    return request.node.name


def with_states(config: DynamicEmbeddingConfig) -> DynamicTable:
    """A table with an optimizer state for each row and for each value, and one of the table."""

    def memory() -> Memory:
        rows = table.capacity
        double = {"dtype": torch.float64}  # so that a step adds what Python adds
        states = {
            "sum": torch.zeros(rows, **double),
            "moment": torch.zeros(rows, DIM, **double),
            "iter": torch.zeros(1),
        }
        return torch.zeros(rows, DIM, **double), states

    table = DynamicTable(config.changed(data_type=DataType.FP64), memory=memory)
    table.weight, table.states = memory()
    return table


def trained(table: DynamicTable, ids: torch.Tensor, by: float) -> torch.Tensor:
    """Changes rows and states in slots as a step does. Returns the ids that have a slot."""
    return stepped(table, table.slots_for(ids), by)


def stepped(table: DynamicTable, slots: torch.Tensor, by: float) -> torch.Tensor:
    own = slots[slots >= 0].unique()
    table.weight[own] += by
    table.states["sum"][own] += 2 * by
    table.states["moment"][own] += 3 * by
    return table.index.keys[own]


# ---- a row that comes back ----


@pytest.mark.parametrize("mode", ["hybrid", "cache"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("optimizer", [EmbOptimType.ADAM, EmbOptimType.EXACT_ROWWISE_ADAGRAD], ids=lambda own: own.name)
def test_an_evicted_id_comes_back_with_its_trained_row_and_optimizer_state(
    tier: Any, name: str, kind: str, mode: str, optimizer: EmbOptimType
) -> None:
    config = DynamicEmbeddingConfig(name, 8, 128, feature_names=["user"], tiers=[tier(kind, mode=mode)], evict="lfu")
    collection = DynamicEmbeddingBagCollection([config], optimizer, {"lr": 0.1})
    table = collection.table(name)

    def step(first: int, count: int) -> None:
        ids = torch.arange(first, first + count)
        batch = KeyedJaggedTensor(["user"], ids, lengths=torch.ones(count, dtype=torch.int64))
        collection(batch).values().pow(2).sum().backward()

    def stored(id: int) -> Rows:
        (rows,) = [rows.at(rows.ids == id) for rows in table.export_batches() if bool((rows.ids == id).any())]
        return rows

    step(-5, 20)
    step(-5, 20)
    before = stored(3)
    step(10**15, 128)
    assert table.slots_of(torch.tensor([3])).tolist() == [-1]
    one = KeyedJaggedTensor(["user"], torch.tensor([3]), lengths=torch.tensor([1]))
    assert torch.equal(collection.eval()(one).values()[0], before.weight[0])  # read through
    assert table.slots_of(torch.tensor([3])).tolist() == [-1]
    collection.train()
    looked = collection(one).values()
    assert torch.equal(looked[0], before.weight[0])
    after = stored(3)
    assert torch.equal(after.weight, before.weight)
    assert not torch.equal(after.weight[0], table.initial(torch.tensor([3]))[0])
    assert len(after.states) == (2 if optimizer is EmbOptimType.ADAM else 1)
    for state, value in before.states.items():
        assert torch.equal(after.states[state], value)
        assert bool(value.any())
    assert (before.scores.item(), after.scores.item()) == (2, 3)
    assert table.total_size == 148


@pytest.mark.parametrize("kind", ["disk", REDIS])
def test_a_tier_outlives_its_table(tier: Any, name: str, kind: str) -> None:
    config = DynamicEmbeddingConfig(name, DIM, 128, tiers=[Tier("host", capacity=128), tier(kind)])
    table = with_states(config)
    for first in (0, 100, 200, 300, 400):
        trained(table, torch.arange(first, first + 100), first + 1.0)
    expected = torch.cat([rows.weight[rows.ids.argsort()] for rows in [*table.export_batches(1000)]]).sum()
    table.flush()
    assert table.size == 0
    again = with_states(pickle.loads(pickle.dumps(config)))
    assert again.total_size == 500
    rows, found = again.find(torch.arange(500))
    assert found.all()
    torch.testing.assert_close(rows.sum(), expected)
    again.slots_for(torch.tensor([250]))
    assert again.states["moment"][again.slots_of(torch.tensor([250]))].tolist() == [[603.0] * DIM]
    again.tiers.close()  # type: ignore[union-attr]
    with pytest.raises(ValueError, match=r"has rows of weight torch.float64 \[4\], moment .*, and the table has"):
        DynamicTable(config).find(torch.arange(3))
    half = DynamicTable(config, columns=(0, 2))
    with pytest.raises(ValueError, match=r"has rows of 'partitions-0-1_columns-0-4', which the shard .*columns-0-2"):
        half.find(torch.arange(3))


# ---- against a dict ----


class Model:
    """What a table with tiers must hold: id -> weight, state per row, state per value."""

    def __init__(self, table: DynamicTable) -> None:
        self.table, self.rows, self.losses = table, dict[int, tuple[Any, float, Any]](), 0
        # ids of the call in progress -> the row that it inserts; None for those with a row, which it does not lose
        self.batch = dict[int, tuple[Any, float, Any] | None]()
        table.on_evict = self.lost

    def lost(self, rows: Rows) -> None:
        for id, own in self.by_id(rows).items():
            assert own == (self.batch[id] if id in self.batch else self.rows.pop(id))
            self.losses += 1

    @contextmanager
    def call(self, ids: torch.Tensor, weight: float | None = None) -> Iterator[None]:
        """Calls the table with a batch inside. Ids without a row are inserted with this weight, else initial."""
        states = (0.0, [0.0] * DIM)
        self.batch = {
            id: None if id in self.rows else self.new(id) if weight is None else ([weight] * DIM, *states)
            for id in ids.tolist()
        }
        yield
        self.batch = {}

    def here(self, ids: torch.Tensor) -> list[bool]:
        """Which ids have a row in any tier."""
        return (self.table.index.contains(ids) | self.table._in_tiers(ids)).tolist()

    @staticmethod
    def by_id(rows: Rows) -> dict[int, tuple[Any, float, Any]]:
        moments, sums = rows.states["moment"].tolist(), rows.states["sum"].tolist()
        return dict(zip(rows.ids.tolist(), zip(rows.weight.tolist(), sums, moments, strict=True), strict=True))

    def train(self, ids: torch.Tensor, by: float) -> None:
        ids = ids.unique()
        with self.call(ids):
            slots = self.table.slots_for(ids)
        for id, there in zip(ids.tolist(), self.here(ids), strict=True):
            if there:
                self.rows.setdefault(id, self.new(id))
        present = torch.tensor(self.here(ids), dtype=torch.bool)
        stepped(self.table, slots, by)
        for id in ids[present].tolist():
            weight, total, moment = self.rows[id]
            self.rows[id] = [w + by for w in weight], total + 2 * by, [m + 3 * by for m in moment]
        rows = self.table.read_rows(ids[present & (slots < 0)])
        states = {"sum": rows.states["sum"] + 2 * by, "moment": rows.states["moment"] + 3 * by}
        with self.call(ids):
            self.table.write_rows(rows._replace(weight=rows.weight + by, states=states))

    def new(self, id: int) -> tuple[Any, float, Any]:
        return self.table.initial(torch.tensor([id]))[0].tolist(), 0.0, [0.0] * DIM

    def find(self, ids: torch.Tensor, by: float) -> None:
        rows, found = self.table.find(ids)
        for id, row, there in zip(ids.tolist(), rows.tolist(), found.tolist(), strict=True):
            assert there == (id in self.rows)
            assert row == (self.rows.get(id) or self.new(id))[0]

    def assign(self, ids: torch.Tensor, by: float) -> None:
        known = self.table.assign(ids, torch.full((len(ids), DIM), by, dtype=torch.float64))
        assert known.tolist() == [id in self.rows for id in ids.tolist()]
        for id in {*ids.tolist()} & {*self.rows}:
            self.rows[id] = [by] * DIM, *self.rows[id][1:]

    def accumulate(self, ids: torch.Tensor, by: float) -> None:
        ids = ids.unique()
        expects = torch.tensor([id in self.rows or id % 5 == 0 for id in ids.tolist()], dtype=torch.bool)
        added = [
            id for id, expected in zip(ids.tolist(), expects.tolist(), strict=True) if expected and id in self.rows
        ]
        for id in added:
            weight, *states = self.rows[id]
            self.rows[id] = [w + by for w in weight], *states  # type: ignore[assignment]
        with self.call(ids, by):
            done = self.table.accum_or_assign(ids, torch.full((len(ids), DIM), by, dtype=torch.float64), expects)
        for id, expected, happened in zip(ids.tolist(), expects.tolist(), done.tolist(), strict=True):
            if expected:
                assert happened == (id in added)
            elif happened:
                self.rows[id] = [by] * DIM, 0.0, [0.0] * DIM

    def insert(self, ids: torch.Tensor, by: float) -> None:
        with self.call(ids, by):
            self.table.insert_and_evict(ids, torch.full((len(ids), DIM), by, dtype=torch.float64))
        for id, there in zip(ids.tolist(), self.here(ids), strict=True):
            if there:
                self.rows[id] = [by] * DIM, *(self.rows.get(id) or self.new(id))[1:]

    def write(self, ids: torch.Tensor, by: float) -> None:
        ids = ids.unique()
        rows = self.table.read_rows(ids)._replace(weight=torch.full((len(ids), DIM), by, dtype=torch.float64))
        with self.call(ids, by):
            self.table.write_rows(rows)
        for id, there in zip(ids.tolist(), self.here(ids), strict=True):
            if there:
                self.rows[id] = [by] * DIM, *(self.rows.get(id) or self.new(id))[1:]

    def erase(self, ids: torch.Tensor, by: float) -> None:
        assert self.table.erase(ids) == len({*ids.tolist()} & {*self.rows})
        for id in ids.tolist():
            self.rows.pop(id, None)

    def erase_some(self, ids: torch.Tensor, by: float) -> None:
        gone = [id for id in self.rows if id % 7 == 0]
        assert self.table.erase_if(lambda own, scores: own % 7 == 0) == len(gone)
        for id in gone:
            del self.rows[id]

    def reload(self, ids: torch.Tensor, by: float) -> None:
        """Continues with a copy that is made of the state."""
        other = with_states(self.table.config)
        other.load_state(copy.deepcopy(self.table.state()))
        other.on_evict = self.lost
        self.table = other

    def check(self) -> None:
        exported = [self.by_id(rows) for rows in self.table.export_batches(100)]
        assert sum(map(len, exported)) == len(self.rows) == self.table.total_size
        assert {id: own for part in exported for id, own in part.items()} == self.rows
        for own in self.table.tier_counters().values():
            assert own["hits"] + own["misses"] == own["lookups"]
            assert own["inserts"] - own["evictions"] - own["erasures"] == own["size"]
        counted = self.table.tier_counters()
        assert counted["fast"]["size"] == self.table.size


OPERATIONS = ["train"] * 3 + ["find", "assign", "accumulate", "insert", "write", "erase", "erase_some", "reload"]
CHAINS = [[], [128], [128, 256], [1 << 14], [128, 1 << 14]]


@given(
    capacities=st.sampled_from(CHAINS),
    modes=st.lists(st.sampled_from(["hybrid", "cache"]), min_size=2, max_size=2),
    evict=st.sampled_from(["lru", "lfu", "epoch_lfu"]),
    grows=st.booleans(),
    admit=st.sampled_from([None, 2]),
    steps=st.lists(
        st.tuples(st.sampled_from(OPERATIONS), st.integers(0, 10**6), st.sampled_from([3, 90, 200])), max_size=10
    ),
)
@settings(max_examples=40, phases=[Phase.generate])
def test_a_table_with_tiers_holds_what_a_dict_holds(
    capacities: list[int], modes: list[str], evict: str, grows: bool, admit: Any, steps: list[tuple[str, int, int]]
) -> None:
    tiers = [Tier("host", capacity=own, mode=mode, name=mode + str(own)) for own, mode in zip(capacities, modes)]  # noqa: B905
    config = DynamicEmbeddingConfig("t", DIM, 128, 384 if grows else 128, evict=evict, tiers=tiers, admit=admit)
    model = Model(with_states(config))
    model.train(torch.arange(100).repeat(2), 1.0)
    for number, (operation, seed, count) in enumerate(steps):
        ids = torch.randint(0, 500, (count,), generator=torch.Generator().manual_seed(seed))
        getattr(model, operation)(ids, float(number))
        model.check()


@pytest.mark.parametrize(("evict", "mode", "capacities"), [("lru", "hybrid", [128]), ("lfu", "cache", [128, 128])])
@pytest.mark.parametrize("operation", ["train", "insert", "accumulate", "write"])
def test_a_full_tier_keeps_the_rows_of_a_batch(operation: str, evict: str, mode: str, capacities: list[int]) -> None:
    """The model refuses to lose them."""
    tiers = [Tier("host", capacity=own, mode=mode, name=str(at)) for at, own in enumerate(capacities)]
    model = Model(with_states(DynamicEmbeddingConfig("t", DIM, 128, evict=evict, tiers=tiers)))
    rng = torch.Generator().manual_seed(0)
    for number in range(6):
        model.train(torch.randint(0, 500, (200,), generator=rng), 1.0)
        getattr(model, operation)(torch.randint(0, 500, (200,), generator=rng), float(number))
        model.check()
    assert model.losses > 100


def test_an_id_of_a_tier_needs_no_second_admission() -> None:
    table = with_states(DynamicEmbeddingConfig("t", DIM, 128, tiers=[Tier("host", capacity=1024)], admit=2))
    for first in (0, 1000):
        trained(table, torch.arange(first, first + 128).repeat(2), 1.0)
    assert (table.slots_for(torch.tensor([5, 5000])) >= 0).tolist() == [True, False]
    assert table.counters.refusals == 1


@pytest.mark.parametrize(("pooled", "prefetched"), [(True, False), (True, True), (False, True)])
@pytest.mark.parametrize("optimizer", [EmbOptimType.ADAM, EmbOptimType.EXACT_ROWWISE_ADAGRAD], ids=lambda own: own.name)
def test_a_batch_larger_than_the_fast_tier_trains_as_a_table_that_has_room(
    optimizer: EmbOptimType, prefetched: bool, pooled: bool
) -> None:
    kind = DynamicEmbeddingBagCollection if pooled else DynamicEmbeddingCollection

    def made(capacity: int, tiers: list[Tier]) -> Any:
        same: dict[str, Any] = {"data_type": DataType.FP64, "weight_init_min": -0.1, "weight_init_max": 0.1}
        one = DynamicEmbeddingConfig("t", 8, capacity, feature_names=["u", "v"], tiers=tiers, **same)
        return kind([one, DynamicEmbeddingConfig("w", 4, 4096, **same)], optimizer, {"lr": 0.1})

    small, large = made(128, [Tier("host", capacity=256), Tier("host", capacity=1 << 14, name="last")]), made(8192, [])
    rng, batches = torch.Generator().manual_seed(0), []
    for size in (4, 40, 3, 60, 60, 5, 50, 4, 4, 70):
        lengths = torch.randint(0, 9, (3 * size,), generator=rng)
        ids = torch.randint(0, 900, (int(lengths.sum()),), generator=rng) * 10**6
        batches.append(KeyedJaggedTensor(["u", "v", "w"], ids, lengths=lengths))
    arguments = []
    for batch in batches:
        offsets = batch.offsets() if pooled else batch.offsets()[:: len(batch.offsets()) // 3]
        arguments.append(KernelInput(batch.values(), offsets, None, batch.length_per_key()))
    passes: list[list[torch.Tensor]] = [[], []]
    for collection, found in zip((small, large), passes, strict=True):
        kernel, coming = collection._kernel, None
        for own, following in zip(arguments, [*arguments[1:], None], strict=True):
            rows, saved = kernel.forward(own._replace(prefetched=coming), True)
            coming = kernel.prefetch(following) if prefetched and following else None
            kernel.backward(saved, 2 * rows)
            found.append(rows.detach().clone())
    for mine, whole in zip(*passes, strict=True):
        torch.testing.assert_close(mine, whole, rtol=1e-9, atol=1e-9)
    own, other = small.table("t"), large.table("t")
    assert own.counters.overflows > 500
    assert own.total_size == other.total_size
    for rows in other.export_batches():
        here = own.read_rows(rows.ids)
        torch.testing.assert_close(here.weight, rows.weight, rtol=1e-9, atol=1e-9)
        for name, state in rows.states.items():
            torch.testing.assert_close(here.states[name], state, rtol=1e-9, atol=1e-9)


def uneven_ids() -> torch.Tensor:
    """256 ids of one partition that are in two buckets of 2, and in one of 3."""
    from recshard_lab.embedding.dynamic import index_rounds

    ids = torch.arange(100_000)
    hashed, _ = index_rounds.hashes(ids)
    low, partition = hashed & 0xFFFFFFFF, index_rounds.partitions_of(ids, 8)
    middle = (partition == 0) & ((low * 3) >> 32 == 1)
    first = (low * 2) >> 32 == 0
    return torch.cat([ids[middle & first][:128], ids[middle & ~first][:128]])


@pytest.mark.parametrize("tiers", [[], [Tier("host", capacity=2048)]], ids=["evicted", "tier"])
def test_ids_that_are_lost_while_an_index_grows_keep_their_rows(tiers: list[Tier]) -> None:
    table = with_states(DynamicEmbeddingConfig("t", DIM, 2048, 3072, choices=1, tiers=tiers))
    lost: list[Rows] = []
    table.on_evict = lost.append
    ids = uneven_ids()
    trained(table, ids, 7.0)
    assert (table.capacity, table.size) == (2048, 256)
    table.slots_for(torch.arange(200_000, 201_900))
    assert table.capacity == 3072
    missing = ids[~table.index.contains(ids)]
    assert len(missing) >= 128
    if tiers:
        rows, found = table.find(ids)
        assert found.all()
        assert torch.equal(rows, table.initial(ids) + 7.0)
        assert not lost
    else:
        assert sorted(torch.cat([rows.ids for rows in lost]).tolist()) == sorted(missing.tolist())
        assert all(torch.equal(rows.weight, table.initial(rows.ids) + 7.0) for rows in lost)


@pytest.mark.parametrize("capacities", [[], [128]], ids=["evicted", "tier"])
def test_ids_that_are_overwritten_and_lost_in_one_call_are_lost_with_the_new_row(capacities: list[int]) -> None:
    tiers = [Tier("host", capacity=own) for own in capacities]
    table = with_states(DynamicEmbeddingConfig("t", DIM, 2048, 3072, choices=1, tiers=tiers))
    ids = uneven_ids()
    trained(table, ids, 7.0)
    batch = torch.cat([torch.arange(-1900, 0), ids])
    lost = table.insert_and_evict(batch, torch.full((len(batch), DIM), 5.0, dtype=torch.float64))
    assert table.capacity == 3072
    old = torch.isin(lost.ids, ids)
    assert int(old.sum()) > 50
    assert lost.weight.unique().tolist() == [5.0]
    assert lost.states["sum"][old].unique().tolist() == [14.0]


# ---- prefetch ----


def batches(count: int) -> list[KeyedJaggedTensor]:
    rng = torch.Generator().manual_seed(0)
    made = []
    for _ in range(count):
        lengths = torch.randint(0, 9, (2 * 16,), generator=rng)
        made.append(
            KeyedJaggedTensor(["u", "v"], torch.randint(0, 400, (int(lengths.sum()),), generator=rng), lengths=lengths)
        )
    return made


def with_host() -> DynamicEmbeddingBagCollection:
    """Evicts new ids first, so that a batch would evict those of the batch before."""
    tiers = [Tier("host", capacity=1024)]
    config = DynamicEmbeddingConfig("t", 8, 256, feature_names=["u", "v"], tiers=tiers, evict="lfu")
    return DynamicEmbeddingBagCollection([config], torch.optim.Adagrad, {"lr": 0.1})


def prefetching(data: list[KeyedJaggedTensor], early: bool) -> DynamicTable:
    """The table after training. Each batch is prefetched before the backward of the one before, or after it."""
    collection = with_host()
    kernel = collection._kernel
    arguments = [KernelInput(batch.values(), batch.offsets(), None, batch.length_per_key()) for batch in data]
    prefetched: Any = kernel.prefetch(arguments[0])
    for own, following in zip(arguments, [*arguments[1:], None], strict=True):
        rows, saved = kernel.forward(own._replace(prefetched=prefetched), True)
        prefetched = None  # it keeps the ids in their slots
        if early and following is not None:
            prefetched = kernel.prefetch(following)
        kernel.backward(saved, 2 * rows)
        if not early and following is not None:
            prefetched = kernel.prefetch(following)
    return collection.table("t")


def test_prefetched_batches_train_as_others_and_look_up_once() -> None:
    plain, data = with_host(), batches(30)
    for batch in data:
        plain(batch).values().pow(2).sum().backward()
    expected, early, late = plain.table("t"), prefetching(data, True), prefetching(data, False)
    assert expected.counters.evictions > 100
    lookups = expected.counters.lookups  # before those of find
    for found in (early, late):
        assert expected.counters.overflows == found.counters.overflows == 0
        assert torch.equal(expected.find(torch.arange(400))[0], found.find(torch.arange(400))[0])
        assert found.counters.lookups == lookups + 400


def test_whether_a_backward_has_ended_does_not_affect_which_ids_are_evicted() -> None:
    often, new = torch.arange(140), [torch.arange(1000 * at, 1000 * at + 90) for at in range(1, 9)]
    data = [
        KeyedJaggedTensor(["u", "v"], ids, lengths=torch.tensor([len(ids), 0])) for ids in (often, often, often, *new)
    ]
    early, late = prefetching(data, True), prefetching(data, False)
    assert early.counters.evictions > 400
    assert torch.equal(early.index.keys, late.index.keys)


# ---- failures, cost, arguments ----


class Broken(HostStore):
    """Fails in its n-th call from now."""

    left = 0

    def _fail(self) -> None:
        self.left -= 1
        if self.left == 0:
            raise OSError("no answer")

    def _get(self, ids: torch.Tensor) -> tuple[Rows, torch.Tensor]:
        self._fail()
        return super()._get(ids)

    def _put(self, rows: Rows) -> Any:
        self._fail()
        return super()._put(rows)

    def _delete(self, ids: torch.Tensor) -> int:
        self._fail()
        return super()._delete(ids)


@pytest.mark.parametrize("mode", ["hybrid", "cache"])
@pytest.mark.parametrize("broken", [0, 1])
@pytest.mark.parametrize("call", range(1, 7))
def test_a_tier_that_fails_is_named_and_loses_no_row(call: int, broken: int, mode: str) -> None:
    stores: list[Broken] = []

    def opened(format: RowFormat) -> list[Broken]:
        names = ["first", "second"]
        stores.extend(Broken(format, size, name=name, mode=mode) for size, name in zip((128, 4096), names, strict=True))
        return stores

    config = DynamicEmbeddingConfig("t", DIM, 128, data_type=DataType.FP64)
    table, expected = DynamicTable(config, stores=opened), dict[int, list[float]]()
    assert table.total_size == 0  # opens the tiers
    lost: list[Rows] = []
    table.on_evict = lost.append
    rng, messages = torch.Generator().manual_seed(call), list[str]()

    def repaired(action: Any, *arguments: Any) -> Any:
        """What an action returns, repeated once if the tier fails."""
        try:
            return action(*arguments)
        except TierError as error:
            messages.append(str(error))
            return action(*arguments)

    for _ in range(24):
        ids = torch.randint(0, 600, (160,), generator=rng).unique()
        stores[broken].left = call
        slots = repaired(table.slots_for, ids)
        rows = repaired(table.read_rows, ids)
        assert all(expected.get(id, row) == row for id, row in zip(ids.tolist(), rows.weight.tolist(), strict=True))
        repaired(table.write_rows, rows._replace(weight=rows.weight + 1.0))
        stores[broken].left = 0
        expected |= dict(zip(ids.tolist(), (rows.weight + 1.0).tolist(), strict=True))
        assert bool((slots < 0).any())
        exported = [own for batch in table.export_batches() for own in zip(batch.ids.tolist(), batch.weight.tolist())]  # noqa: B905
        assert len(exported) == len(expected) == table.total_size
        assert dict(exported) == expected
        for own in table.tier_counters().values():
            assert own["inserts"] - own["evictions"] - own["erasures"] == own["size"]
    assert len(messages) >= 3
    assert all(f"tier {stores[broken].name!r} failed (OSError: no answer)" in message for message in messages)
    assert all("Fix: repair the tier" in message for message in messages)
    assert not lost


def test_an_emulated_cost_is_the_least_time_of_an_access(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    monkeypatch.setattr(time, "perf_counter", lambda: 7.0)  # an access takes no time
    format = RowFormat(250, torch.float32)
    store = HostStore(format, 128, cost=EmulatedCost(latency_us=5000, gb_per_s=0.01))
    store.put(format.empty(torch.arange(100)))
    store.get(torch.arange(100, 200))
    assert slept == pytest.approx([0.015, 0.005])  # 5 ms, and 100 kB at 10 MB/s


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"kind": "tape"}, "kind='tape' is not supported. Fix: use 'host', 'disk', 'redis'"),
        ({"kind": "host"}, r"Tier\('host'\) needs capacity. Fix: pass capacity="),
        ({"kind": "disk", "path": "x", "capacity": 5}, r"Tier\('disk'\) has no capacity. Fix: omit capacity="),
        ({"kind": "host", "capacity": 1.5}, "capacity=1.5 is not supported. Fix: use a positive integer"),
        ({"kind": "host", "capacity": 5, "mode": "both"}, "mode='both' is not supported. Fix: use 'hybrid', 'cache'"),
    ],
)
def test_wrong_tiers_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Tier(**arguments)
    with pytest.raises(ValueError, match=r"Fix: use tiers with different names: Tier\(name=\)"):
        DynamicEmbeddingConfig("t", DIM, 128, tiers=[Tier("host", capacity=1), Tier("host", capacity=2)])


def test_a_server_that_does_not_answer_is_named(tmp_path: Path) -> None:
    table = DynamicTable(DynamicEmbeddingConfig("t", DIM, 128, tiers=[Tier("redis", url=f"unix://{tmp_path}/none")]))
    with pytest.raises(ConnectionError, match=r"tier 'redis' cannot reach the Redis server at unix://.* Fix: start it"):
        table.find(torch.tensor([1]))
