"""FP16 at its limits, and replicas that took unequal numbers of steps."""

from typing import Any

import pytest
import torch

from recshard_lab import (
    DistributedModelParallel,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    FusedEmbeddingBagCollection,
    KeyedJaggedTensor,
    ParameterSharding,
    ShardingPlan,
)
from recshard_lab.comm import CommType, QCommsConfig, ShardingEnv, get_qcomm_codecs_registry
from recshard_lab.distributed import DMPCollection, EmbeddingBagCollectionSharder
from recshard_lab.distributed.state.replica_sync import _combined, average

MOST = 65504.0  # of FP16


def table(rows: int, dim: int = 4, **more: Any) -> EmbeddingBagConfig:
    return EmbeddingBagConfig(name="t", num_embeddings=rows, embedding_dim=dim, feature_names=["f"], **more)


def collection(config: EmbeddingBagConfig, weights: torch.Tensor) -> EmbeddingBagCollection:
    made = EmbeddingBagCollection([config])
    made.load_state_dict({"embedding_bags.t.weight": weights})
    return made


def bags(*ids: list[int]) -> KeyedJaggedTensor:
    flat = [each for bag in ids for each in bag]
    return KeyedJaggedTensor(["f"], torch.tensor(flat), lengths=torch.tensor([len(bag) for bag in ids]))


# ---- coded sums ----


def coded(route: str, kind: str, values: list[float]) -> tuple[list[list[float]], int, list[list[float]]]:
    """On every rank: the first column of sums of rows on different ranks, how many were cut, and plain sums."""
    weights = torch.tensor(values).view(-1, 1).repeat(1, 4)
    pairs = [[row, row + len(values) // 2] for row in range(len(values) // 2)]
    plan = ShardingPlan({"": {"t": ParameterSharding("row_wise", route=route)}})  # type: ignore[dict-item]
    precision = CommType(kind)
    registry = get_qcomm_codecs_registry(QCommsConfig(precision, precision))
    sharders = [EmbeddingBagCollectionSharder(None, registry)]
    dmp = DistributedModelParallel(collection(table(len(values)), weights), plan=plan, sharders=sharders)
    sums = dmp(bags(*pairs)).values()[:, 0]
    cut = sum({id(codecs.forward): codecs.forward.saturated for codecs in registry.values()}.values())
    return sums.tolist(), cut, [[values[a] + values[b]] for a, b in pairs]


# row i is on rank 0 and is added to row i + 4, which is on rank 1
VALUES = [40_000.0, -40_000.0, 30_000.0, 40_000.0, 40_000.0, -40_000.0, 30_000.0, -40_000.0]


@pytest.mark.filterwarnings("ignore")
def test_partial_sums_beyond_fp16_are_cut_before_a_reduce_scatter_adds_them(two: Any) -> None:
    for sums, cut, _ in two.run(coded, "reduce_scatter", "fp16", VALUES):
        assert sums == [MOST, -MOST, 60_000.0, 0.0]  # halves of the largest number add up to it, and not to infinity
        assert cut == 2 * 3 * 4  # for each of two ranks: three rows of four columns


@pytest.mark.parametrize(("route", "kind"), [("direct", "fp16"), ("two_hop", "bf16"), ("reduce_scatter", "bf16")])
def test_sums_that_are_not_added_in_fp16_stay_whole(two: Any, route: str, kind: str) -> None:
    for sums, cut, plain in two.run(coded, route, kind, VALUES):
        assert sums == pytest.approx([each for (each,) in plain], rel=2**-7)
        assert cut == 0


def test_a_sum_that_a_second_hop_sends_is_cut_at_the_largest_number(two: Any) -> None:
    for sums, cut, _ in two.run(coded, "two_hop", "fp16", VALUES):
        assert sums == [MOST, -MOST, 60_000.0, 0.0]
        assert cut == 8


# ---- averages ----


def averaged(dtype: torch.dtype, numbers: int, copies: bool, apart: bool) -> list[float]:
    """The mean of 40,000 and 48,000, or of 40,000 on all ranks; its smallest and largest number."""
    rank = torch.distributed.get_rank()
    tensor = torch.full((numbers,), 40_000.0 + 8_000.0 * rank * apart, dtype=dtype)
    average([tensor], ShardingEnv.default(), "test", copies=copies)
    return [float(tensor.min()), float(tensor.max())]


@pytest.mark.parametrize("copies", [True, False])
@pytest.mark.parametrize("numbers", [3, 40_000], ids=["in one message with others", "in a message of its own"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_the_mean_of_numbers_whose_sum_overflows_fp16_is_exact(
    two: Any, dtype: torch.dtype, numbers: int, copies: bool
) -> None:
    for apart, mean in ((False, 40_000.0), (True, 44_000.0)):
        assert two.run(averaged, dtype, numbers, copies, apart) == [[mean, mean]] * 2


def test_the_mean_of_three_replicas_is_a_third_of_their_sum() -> None:
    assert _combined(torch.tensor([[1.0, 4.0], [2.0, 4.0], [6.0, 4.0]])).tolist() == [3.0, 4.0]


# ---- unequal steps ----

ADAM = {"learning_rate": 0.1, "eps": 0.01}
STEPS = [3, 1]  # of each replica before the first sync


def trained(model: Any, steps: int, first: int = 0) -> None:
    for step in range(first, first + steps):
        (model(bags([step, step + 1], [7])).values() * torch.arange(1.0, 5.0)).sum().backward()


def unequal() -> dict[str, list[torch.Tensor]]:
    """Two replicas that took 3 steps and 1, a sync, and one more step each: weights and states after both."""
    rank, everybody = torch.distributed.get_rank(), torch.distributed.group.WORLD
    sharders = [EmbeddingBagCollectionSharder(fused_params={"optimizer": "adam", **ADAM})]
    start = torch.linspace(-1, 1, 40).view(10, 4)
    dmp = DMPCollection(collection(table(10), start), "cpu", None, 2, 1, everybody, sharders=sharders)
    (sharded,) = dmp.collections.values()
    trained(sharded, STEPS[rank])  # past the wrapper, which averages dense gradients on all ranks in each step
    dmp._may_differ = True
    found: dict[str, list[torch.Tensor]] = {}
    for _ in range(2):
        dmp.sync()
        (shards,) = sharded.table_shards().values()
        for part in shards.parts():
            (matrix,) = shards.matrices(part).values()
            found.setdefault(part.name, []).append(matrix.detach().clone().reshape(-1))
        trained(sharded, 1, 5)
    return found


def test_replicas_that_took_unequal_steps_are_averaged_and_go_on_from_the_larger_count(two: Any) -> None:
    start = torch.linspace(-1, 1, 40).view(10, 4)
    twins = [FusedEmbeddingBagCollection([table(10)], "adam", dict(ADAM), backend="native") for _ in STEPS]
    for twin, steps in zip(twins, STEPS, strict=True):
        twin.load_state_dict({"embedding_bags.t.weight": start})
        trained(twin, steps)

    def mean() -> dict[str, torch.Tensor]:
        with torch.no_grad():
            for name in ("weight", "momentum1", "momentum2"):
                own = [
                    twin.embedding_bags["t"].weight if name == "weight" else twin.optimizer_states()["t"][name]
                    for twin in twins
                ]
                middle = (own[0] + own[1]) / 2
                for each in own:
                    each.copy_(middle)
            for twin in twins:
                twin.optimizer_states()["t"]["iter"].fill_(max(int(t.optimizer_states()["t"]["iter"]) for t in twins))
        states = twins[0].optimizer_states()["t"]
        return {"weight": twins[0].embedding_bags["t"].weight.detach().clone()} | {
            k: v.clone() for k, v in states.items()
        }

    truth = [mean()]
    for twin in twins:
        trained(twin, 1, 5)
    truth.append(mean())
    for found in two.run(unequal):
        assert [int(count) for count in found["iter"]] == [3, 4] == [int(expected["iter"]) for expected in truth]
        for name in ("weight", "momentum1", "momentum2"):
            for one, expected in zip(found[name], truth, strict=True):
                torch.testing.assert_close(one, expected[name].reshape(-1), rtol=1e-5, atol=1e-6)
