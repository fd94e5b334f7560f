"""Small functions of the planner, and its searches over one number."""

from typing import Any

from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.fbgemm_qcomm_codec import CommType, QCommsConfig, get_qcomm_codecs_registry
from torchrec.distributed.planner.types import ParameterConstraints, SharderData, Storage
from torchrec.distributed.planner.utils import (
    BinarySearchPredicate,
    LuusJaakolaSearch,
    build_sharder_data,
    build_sharder_data_map,
    bytes_to_gb,
    bytes_to_mb,
    extract_comm_data_type_size,
    gb_to_bytes,
    get_num_poolings,
    is_prefetch_pipelined,
    mb_to_bytes,
    placement,
    prod,
    reset_shard_rank,
    sharder_name,
    storage_repr_in_gb,
)
from torchrec.distributed.types import CacheParams

from tests.compat.parity.case import case
from tests.compat.parity.planner_models import bags, enumerated, option, ranks, sequences

U = "torchrec.distributed.planner.utils."


@case(U + "bytes_to_gb", U + "bytes_to_mb", U + "gb_to_bytes", U + "mb_to_bytes", U + "prod")
def units() -> Any:
    return bytes_to_gb(3 << 29), bytes_to_mb(3 << 19), gb_to_bytes(1.5), mb_to_bytes(1.7), prod([2, 3, 4]), prod([])


@case(U + "placement", U + "storage_repr_in_gb", U + "sharder_name", "torchrec.distributed.planner.sharder_name")
def texts() -> Any:
    return [
        [placement(device, 5, 4) for device in ("cpu", "cuda", "mtia")],
        [storage_repr_in_gb(one) for one in (Storage(3 << 29, 1 << 30), Storage(123456789, 5), None)],
        sharder_name(int),
    ]


@case(U + "BinarySearchPredicate")
def binary_searches_probe_these_numbers() -> Any:
    found = []
    for first, last, tolerance, threshold in (
        (0, 100, 0, 37),
        (0, 100, 5, 37),
        (0, 100, 0, 200),
        (0, 100, 0, -1),
        (5, 5, 0, 5),
        (10, 3, 0, 4),
        (0, 3, 3, 1),
        (0, 3, 4, 1),
        (-100, -20, 7, -50),
    ):
        search, tried = BinarySearchPredicate(first, last, tolerance), []
        x = search.next(True)
        while x is not None:
            tried.append(x)
            x = search.next(x <= threshold)
        found.append(tried)
    return found


def luus(first: float, last: float, count: int, **options: Any) -> Any:
    search, tried = LuusJaakolaSearch(first, last, count, **options), []
    y = search.next(0.0)
    while y is not None:
        tried.append(y)
        y = search.next((y - 3) ** 2)
    return tried, search.best()


@case(U + "LuusJaakolaSearch")
def luus_jaakola_probes_these_numbers() -> Any:
    return luus(0, 10, 8), luus(0, 10, 12, seed=1), luus(2, 7, 5, left_cost=5.0)


@case(U + "LuusJaakolaSearch")
def luus_jaakola_keeps_within_its_ends() -> Any:
    search = LuusJaakolaSearch(0, 10, 8)
    before = [search.clamp(x) for x in (-1, 4, 11)], search.uniform(2, 5), search.uniform(2, 5)
    search.shrink_right(6)
    return before, search.clamp(8)


@case(U + "reset_shard_rank")
def ranks_are_reset() -> Any:
    one = option("t", [1, 1], [1.0, 1.0])
    one.shards[0].rank = 3
    reset_shard_rank([one])
    return ranks([one])


@case(U + "get_num_poolings", "torchrec.distributed.planner.shard_estimators.get_num_poolings")
def poolings_come_from_constraints_then_the_option() -> Any:
    one = option("t", [1], [1.0])
    limit = {"t": ParameterConstraints(num_poolings=[3.0])}
    plain = get_num_poolings(None, one), get_num_poolings(limit, one), get_num_poolings({"u": limit["t"]}, one)
    one.num_poolings = [2.0]
    return plain, get_num_poolings(None, one), get_num_poolings(limit, one)


@case(U + "is_prefetch_pipelined")
def prefetch_comes_from_cache_or_sharder() -> Any:
    one = option("t", [1], [1.0], kernel="fused_uvm_caching")
    data = [SharderData({"prefetch_pipeline": flag}, {}, None) for flag in (False, True)] + [SharderData({}, {}, None)]
    plain = [is_prefetch_pipelined(one, entry) for entry in data]
    one.cache_params = CacheParams(load_factor=0.1, prefetch_pipeline=True)
    return plain, [is_prefetch_pipelined(one, entry) for entry in data]


@case(U + "build_sharder_data", U + "build_sharder_data_map", U + "extract_comm_data_type_size")
def messages_have_the_bytes_of_their_codecs() -> Any:
    registry = get_qcomm_codecs_registry(QCommsConfig(CommType.FP16, CommType.BF16))
    plain, coded = EmbeddingBagCollectionSharder(), EmbeddingBagCollectionSharder(qcomm_codecs_registry=registry)
    found = [build_sharder_data(sharder) for sharder in (plain, coded)]
    options = [enumerated(module)[0] for module in (bags((9, 8)), sequences((9, 8)))]
    return [
        [[list(map(float, extract_comm_data_type_size(one, data))) for one in options] for data in found],
        [{key: list(map(float, sizes)) for key, sizes in data.qcomm_dtype_sizes.items()} for data in found],
        [data.storage_usage_type.value for data in found],
        list(build_sharder_data_map({"a": plain, "b": coded})),
    ]
