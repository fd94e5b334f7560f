"""Managed collisions: ids become rows, by policies of eviction; filters of ids; collections."""

from typing import Any

import torch
from torchrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    JaggedTensor,
    KeyedJaggedTensor,
)
from torchrec.modules.mc_embedding_modules import (
    BaseManagedCollisionEmbeddingCollection,
    ManagedCollisionEmbeddingBagCollection,
    ManagedCollisionEmbeddingCollection,
)
from torchrec.modules.mc_modules import (
    DistanceLFU_EvictionPolicy,
    LFU_EvictionPolicy,
    LRU_EvictionPolicy,
    ManagedCollisionCollection,
    ManagedCollisionModule,
    MCHManagedCollisionModule,
    average_threshold_filter,
    dynamic_threshold_filter,
)

from tests.compat.parity.case import case, raised

M = "torchrec.modules.mc_modules"
E = "torchrec.modules.mc_embedding_modules"
CPU = torch.device("cpu")


def module(policy: Any = None, rows: int = 4, **more: Any) -> Any:
    return MCHManagedCollisionModule(
        zch_size=rows, device=CPU, eviction_policy=policy or LFU_EvictionPolicy(), eviction_interval=1, **more
    )


def ids(*values: int) -> dict[str, JaggedTensor]:
    return {"f": JaggedTensor(torch.tensor(values), lengths=torch.tensor([len(values)]))}


def who_has_rows(own: Any, candidates: list[int]) -> Any:
    """Which candidates have a row that they share with no other id, without counting them."""
    own.eval()
    found = own(ids(*candidates, -(2**40)), mutate_miss_lengths=True)["f"].values().tolist()
    own.train()
    shared = found[-1]
    return [candidate for candidate, row in zip(candidates, found, strict=False) if row != shared]


@case(f"{M}.MCHManagedCollisionModule", f"{M}.ManagedCollisionModule")
def facts_of_a_module() -> Any:
    own = module(input_hash_size=1000)
    return {
        "output": own.output_size(),
        "input": own.input_size(),
        "buckets": own.buckets(),
        "device": own.device,
        "base": isinstance(own, ManagedCollisionModule),
        "nothing evicted": own.evict() is None,
    }


@case(f"{M}.MCHManagedCollisionModule", f"{M}.LFU_EvictionPolicy")
def frequent_ids_have_rows() -> Any:
    own = module(LFU_EvictionPolicy())
    found = []
    for batch in ((10, 10, 20, 20, 30), (40, 40, 40, 50), (30, 50, 50, 50, 50)):
        own(ids(*batch))
        found.append(who_has_rows(own, [10, 20, 30, 40, 50]))
    return found


@case(f"{M}.LRU_EvictionPolicy", f"{M}.DistanceLFU_EvictionPolicy")
def recent_ids_have_rows() -> Any:
    found = []
    for policy in (LRU_EvictionPolicy(), DistanceLFU_EvictionPolicy(decay_exponent=1.0)):
        own = module(policy)
        for batch in ((10, 10, 10, 20, 30), (40, 40, 50), (60, 60, 70)):
            own(ids(*batch))
        found.append(who_has_rows(own, [10, 20, 30, 40, 50, 60, 70]))
    return found


@case(f"{M}.MCHManagedCollisionModule")
def known_ids_keep_their_rows() -> Any:
    own = module()
    first = own(ids(5, 7, 9))["f"].values().tolist()
    second = own(ids(9, 7, 5))["f"].values().tolist()
    return [len(set(first)), first == second[::-1], own.output_size() > max(first)]


@case(f"{M}.MCHManagedCollisionModule")
def ids_are_hashed_first() -> Any:
    own = module(input_hash_size=100, input_hash_func=lambda values, size: values % size)
    own(ids(105, 207))
    rows = own(ids(5, 7, 305))["f"].values().tolist()
    return [rows[0] == rows[2], rows[0] != rows[1], own.preprocess(ids(105))["f"].values()]


@case(f"{M}.average_threshold_filter", f"{M}.dynamic_threshold_filter")
def filters_of_ids_by_counts() -> Any:
    counts = torch.tensor([1, 2, 3, 10, 4])
    found = [
        average_threshold_filter(counts),
        dynamic_threshold_filter(counts),
        dynamic_threshold_filter(counts, threshold_skew_multiplier=1.0),
        dynamic_threshold_filter(counts, threshold_skew_multiplier=20.0),
    ]
    return [(kept, float(threshold)) for kept, threshold in found]


@case(f"{M}.ManagedCollisionCollection")
def a_collection_of_modules() -> Any:
    tables = [
        EmbeddingBagConfig(num_embeddings=4, embedding_dim=8, name="t", feature_names=["a", "b"]),
        EmbeddingBagConfig(num_embeddings=8, embedding_dim=8, name="u", feature_names=["c"]),
    ]
    collection = ManagedCollisionCollection({"t": module(), "u": module(rows=8)}, tables)
    kjt = KeyedJaggedTensor(
        ["a", "b", "c"], torch.tensor([100, 200, 100, 300, 400]), lengths=torch.tensor([1, 1, 1, 0, 1, 1])
    )
    rows = collection(kjt)
    wrong = [EmbeddingBagConfig(num_embeddings=5, embedding_dim=8, name="t", feature_names=["a"])]
    values = rows.values().tolist()
    return {
        "keys": rows.keys(),
        "lengths": rows.lengths(),
        "below": [values[place] < size for place, size in enumerate((4, 4, 4, 8, 8))],
        "same id": values[0] == values[2],
        "others": len(set(values[:2])),
        "configs": [table.name for table in collection.embedding_configs()],
        "evicted": sorted(collection.evict()),
        "wrong rows": raised(lambda: ManagedCollisionCollection({"t": module()}, wrong)) != "nothing",
        "missing": raised(lambda: ManagedCollisionCollection({}, tables)) != "nothing",
    }


def managed(pooled: bool, remapped: bool) -> Any:
    table: Any = (EmbeddingBagConfig if pooled else EmbeddingConfig)(
        num_embeddings=4, embedding_dim=8, name="t", feature_names=["f"]
    )
    collection: Any = (EmbeddingBagCollection if pooled else EmbeddingCollection)([table])
    kind: Any = ManagedCollisionEmbeddingBagCollection if pooled else ManagedCollisionEmbeddingCollection
    return kind(collection, ManagedCollisionCollection({"t": module()}, [table]), return_remapped_features=remapped)


@case(
    f"{E}.ManagedCollisionEmbeddingBagCollection",
    f"{E}.ManagedCollisionEmbeddingCollection",
    f"{E}.BaseManagedCollisionEmbeddingCollection",
)
def collections_with_ids_of_any_value() -> Any:
    found = []
    kjt = KeyedJaggedTensor(["f"], torch.tensor([10**12, -5, 10**12]), lengths=torch.tensor([2, 1]))
    for pooled in (True, False):
        for remapped in (True, False):
            own = managed(pooled, remapped)
            output, rows = own(kjt)
            part = output["f"] if pooled else output["f"].values()
            found.append(
                {
                    "shape": part.shape,
                    "grad": part.requires_grad,
                    "rows": None if rows is None else (rows.lengths(), rows.values()[0] == rows.values()[2]),
                    "base": isinstance(own, BaseManagedCollisionEmbeddingCollection),
                }
            )
    return found


@case(f"{E}.ManagedCollisionEmbeddingBagCollection")
def gradients_reach_the_rows() -> Any:
    own = managed(True, True)
    output, rows = own(KeyedJaggedTensor(["f"], torch.tensor([70, 80, 70]), lengths=torch.tensor([2, 1])))
    output.values().sum().backward()
    (weight,) = (parameter for name, parameter in own.named_parameters() if name.endswith("weight"))
    used = weight.grad.abs().sum(1)
    return [used[rows.values()[:2]], used.sum()]
