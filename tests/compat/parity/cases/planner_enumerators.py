"""Options that the enumerator lists."""

from typing import Any

from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner.enumerators import (
    GUARDED_SHARDING_TYPES_FOR_FP_MODULES,
    EmbeddingEnumerator,
    get_partition_by_type,
)
from torchrec.distributed.planner.types import Enumerator, ParameterConstraints, Perf, ShardEstimator, Storage, Topology
from torchrec.distributed.types import ShardingType

from tests.compat.parity.case import case, raised
from tests.compat.parity.planner_models import Model, bags, enumerated, limits, listed, sequences, sharders

E = "torchrec.distributed.planner.enumerators."


@case(E + "get_partition_by_type", E + "GUARDED_SHARDING_TYPES_FOR_FP_MODULES")
def schemes_are_partitioned_by() -> Any:
    found = {kind.value: get_partition_by_type(kind.value) for kind in ShardingType}
    return found, raised(lambda: get_partition_by_type("x")), GUARDED_SHARDING_TYPES_FOR_FP_MODULES


@case(E + "EmbeddingEnumerator")
def options_on_cpu() -> Any:
    return [listed(enumerated(module, None, Topology(2, "cpu"))) for module in (bags((100, 256)), sequences((100, 32)))]


@case(E + "EmbeddingEnumerator")
def options_of_bags_on_cuda() -> Any:
    return listed(enumerated(bags((101, 256))))


@case(E + "EmbeddingEnumerator")
def options_of_sequences_on_cuda() -> Any:
    return listed(enumerated(sequences((101, 32))))


@case(E + "EmbeddingEnumerator")
def options_of_a_table_with_fewer_rows_than_ranks() -> Any:
    return listed(enumerated(bags((3, 64)), limits("row_wise", "fused")))


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


@case(E + "EmbeddingEnumerator")
def an_impossible_constraint_is_refused() -> Any:
    return [
        raised(lambda: enumerated(bags((10, 8)), limits("row_wise", "dense"))),
        raised(lambda: enumerated(bags((10, 8)), limits("bogus", "fused"))),
    ]


@case(E + "EmbeddingEnumerator")
def fields_of_constraints_reach_options() -> Any:
    limit = ParameterConstraints(
        sharding_types=["table_wise"],
        compute_kernels=["fused"],
        pooling_factors=[2.0, 3.0],
        num_poolings=[1.0, 2.0],
        stochastic_rounding=True,
        enforce_hbm=True,
        feature_names=["a", "b"],
    )
    one = enumerated(bags((10, 8), features=2), {"t0": limit})[0]
    return [
        one.input_lengths,
        one.num_poolings,
        one.stochastic_rounding,
        one.enforce_hbm,
        one.feature_names,
        one.batch_size,
        one.bounds_check_mode,
        one.key_value_params,
        one.output_dtype,
        one.cache_params,
    ]


@case(E + "EmbeddingEnumerator")
def without_constraints_a_table_has_one_length() -> Any:
    return [o.input_lengths for o in enumerated(bags((10, 8), features=3))][:3]


@case(E + "EmbeddingEnumerator")
def order_of_modules() -> Any:
    class Two(Model):
        def __init__(self) -> None:
            super().__init__()
            self.more = sequences((10, 8), (20, 8))

    topology, found = Topology(2, "cuda"), []
    for exact in (False, True):
        made = EmbeddingEnumerator(topology, 8, use_exact_enumerate_order=exact)
        found.append(list(dict.fromkeys(o.fqn for o in made.enumerate(Two(), sharders()))))
    return found


@case(E + "EmbeddingEnumerator")
def an_enumerator_keeps_its_space_and_sharders() -> Any:
    made = EmbeddingEnumerator(topology=Topology(2, "cuda"), batch_size=8, constraints=limits("table_wise", "fused"))
    before = made.last_stored_search_space
    options = made.enumerate(module=bags((10, 8)), sharders=sharders())
    space = made.last_stored_search_space
    return before, len(options), len(space or []), len(made.sharder_map), next(iter(made.sharder_map)).split(".")[-1]


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


@case(E + "EmbeddingEnumerator")
def estimates_are_repeated_on_request() -> Any:
    made = EmbeddingEnumerator(Topology(2, "cuda"), 8, limits("table_wise", "fused"))
    options = made.enumerate(bags((10, 8)), sharders())
    first = listed(options)
    options[0].compute_kernel = "fused_uvm"
    made.populate_estimates(options)
    return first, listed(options)


class OnlyRows(EmbeddingBagCollectionSharder):
    def sharding_types(self, compute_device_type: str) -> list[str]:
        return ["row_wise"]

    def compute_kernels(self, sharding_type: str, compute_device_type: str) -> list[str]:
        return [EmbeddingComputeKernel.FUSED.value]


@case(E + "EmbeddingEnumerator")
def a_sharder_of_the_user_restricts_options() -> Any:
    made = EmbeddingEnumerator(Topology(2, "cpu"), 8)
    return listed(made.enumerate(bags((10, 8)), [OnlyRows()]), costs=False)


@case("torchrec.distributed.planner.types.Enumerator")
def an_enumerator_is_abstract() -> Any:
    return raised(lambda: Enumerator(Topology(1, "cpu")))


@case(E + "EmbeddingEnumerator", differs="row-wise bags run on CPUs here, so a constraint may name row_wise")
def row_wise_bags_on_cpu() -> Any:
    topology = Topology(2, "cpu")
    return raised(lambda: enumerated(bags((10, 8)), limits("row_wise", "fused"), topology))
