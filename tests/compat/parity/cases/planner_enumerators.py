"""Options that the enumerator lists."""

from typing import Any

from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner.enumerators import (
    EmbeddingEnumerator,
)
from torchrec.distributed.planner.types import Enumerator, ParameterConstraints, Perf, ShardEstimator, Storage, Topology

from tests.compat.parity.case import case, raised
from tests.compat.parity.planner_models import bags, enumerated, limits, listed, sequences, sharders

E = "torchrec.distributed.planner.enumerators."


@case(E + "EmbeddingEnumerator")
def options_on_cpu() -> Any:
    return [listed(enumerated(module, None, Topology(2, "cpu"))) for module in (bags((100, 256)), sequences((100, 32)))]


@case(E + "EmbeddingEnumerator")
def columns_are_split_where_they_divide() -> Any:
    found = []
    for cols, width in ((96, 32), (100, 32), (96, 64), (132, None), (300, 128), (8, 16), (512, None)):
        for scheme in ("column_wise", "table_column_wise", "grid_shard"):
            options = enumerated(bags((10, cols)), limits(scheme, "fused", min_partition=width))
            found.append([cols, width, listed(options, costs=False)])
    return found


@case(E + "EmbeddingEnumerator")
def constraints_restrict_options() -> Any:
    limit = {"t0": ParameterConstraints(sharding_types=["row_wise", "table_wise"]), "t1": ParameterConstraints()}
    options = listed(enumerated(bags((10, 8), (20, 8)), limit), costs=False)
    kernels = listed(
        enumerated(bags((10, 8)), {"t0": ParameterConstraints(compute_kernels=["fused", "dense"])}), costs=False
    )
    return options, kernels


class Constant(ShardEstimator):
    def __init__(self, topology: Any, constraints: Any = None) -> None:
        self.seen: list[Any] = []

    def estimate(self, sharding_options: Any, sharder_data_map: Any = None) -> None:
        self.seen.append(sorted(key.split(".")[-1] for key in sharder_data_map))
        for option in sharding_options:
            for shard in option.shards:
                shard.perf, shard.storage = Perf(1.0, 2.0, 3.0, 4.0), Storage(5, 6)


@case(E + "EmbeddingEnumerator", "torchrec.distributed.planner.types.ShardEstimator")
def an_estimator_of_the_user_sets_costs() -> Any:
    topology = Topology(2, "cuda")
    found = []
    for estimator in (Constant(topology), [Constant(topology)]):
        made = EmbeddingEnumerator(topology, 8, limits("row_wise", "fused"), estimator)
        found.append(listed(made.enumerate(bags((10, 8)), sharders())))
    return found, Constant(topology).seen, raised(ShardEstimator)


class OnlyRows(EmbeddingBagCollectionSharder):
    def sharding_types(self, compute_device_type: str) -> list[str]:
        return ["row_wise"]

    def compute_kernels(self, sharding_type: str, compute_device_type: str) -> list[str]:
        return [EmbeddingComputeKernel.FUSED.value]


@case("torchrec.distributed.planner.types.Enumerator")
def an_enumerator_is_abstract() -> Any:
    return raised(lambda: Enumerator(Topology(1, "cpu")))
