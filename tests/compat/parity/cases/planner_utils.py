"""Small functions of the planner, and its searches over one number."""

from typing import Any

from torchrec.distributed.planner.types import ParameterConstraints, Storage
from torchrec.distributed.planner.utils import (
    get_num_poolings,
    placement,
    sharder_name,
    storage_repr_in_gb,
)

from tests.compat.parity.case import case
from tests.compat.parity.planner_models import option

U = "torchrec.distributed.planner.utils."


@case(U + "placement", U + "storage_repr_in_gb", U + "sharder_name", "torchrec.distributed.planner.sharder_name")
def texts() -> Any:
    return [
        [placement(device, 5, 4) for device in ("cpu", "cuda", "mtia")],
        [storage_repr_in_gb(one) for one in (Storage(3 << 29, 1 << 30), Storage(123456789, 5), None)],
        sharder_name(int),
    ]


@case(U + "get_num_poolings", "torchrec.distributed.planner.shard_estimators.get_num_poolings")
def poolings_come_from_constraints_then_the_option() -> Any:
    one = option("t", [1], [1.0])
    limit = {"t": ParameterConstraints(num_poolings=[3.0])}
    plain = get_num_poolings(None, one), get_num_poolings(limit, one), get_num_poolings({"u": limit["t"]}, one)
    one.num_poolings = [2.0]
    return plain, get_num_poolings(None, one), get_num_poolings(limit, one)
