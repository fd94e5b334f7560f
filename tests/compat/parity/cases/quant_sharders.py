"""Sharders of quantized collections. The sharded ones need a GPU in TorchRec: see tests/compat/test_quantized.py."""

from inspect import signature
from typing import Any

from torchrec.distributed import quant_embedding, quant_embeddingbag
from torchrec.distributed.mc_modules import InferManagedCollisionCollectionSharder
from torchrec.modules.mc_modules import ManagedCollisionCollection
from torchrec.quant import embedding_modules as quant

from tests.compat.parity.case import case

BAG, SEQ = "torchrec.distributed.quant_embeddingbag", "torchrec.distributed.quant_embedding"
PROCESSED = f"{BAG}.QuantFeatureProcessedEmbeddingBagCollectionSharder"
MANAGED = f"{BAG}.QuantManagedCollisionEmbeddingBagCollectionSharder"
MANAGED_SEQ = f"{SEQ}.QuantManagedCollisionEmbeddingCollectionSharder"


def sharders() -> dict[str, Any]:
    """One of each kind."""
    rows = InferManagedCollisionCollectionSharder()
    return {
        "processed": quant_embeddingbag.QuantFeatureProcessedEmbeddingBagCollectionSharder({"x": 1}),
        "managed": quant_embeddingbag.QuantManagedCollisionEmbeddingBagCollectionSharder(
            quant_embeddingbag.QuantEmbeddingBagCollectionSharder({"x": 2}), rows
        ),
        "sequences": quant_embedding.QuantEmbeddingCollectionSharder(),
        "managed sequences": quant_embedding.QuantManagedCollisionEmbeddingCollectionSharder(
            quant_embedding.QuantEmbeddingCollectionSharder({"x": 3}), rows
        ),
    }


@case(PROCESSED, MANAGED, f"{SEQ}.QuantEmbeddingCollectionSharder", MANAGED_SEQ)
def schemes_of_quantized_sharders() -> Any:
    return {name: sorted(own.sharding_types("cuda")) for name, own in sharders().items()}


@case(PROCESSED, MANAGED, MANAGED_SEQ)
def settings_of_quantized_sharders() -> Any:
    return {name: own.fused_params for name, own in sharders().items()}


@case(PROCESSED, MANAGED, f"{SEQ}.QuantEmbeddingCollectionSharder", MANAGED_SEQ)
def module_types_of_quantized_sharders() -> Any:
    kinds = {
        "processed": quant.FeatureProcessedEmbeddingBagCollection,
        "managed": quant.QuantManagedCollisionEmbeddingBagCollection,
        "sequences": quant.EmbeddingCollection,
        "managed sequences": quant.QuantManagedCollisionEmbeddingCollection,
    }
    return {name: own.module_type is kinds[name] for name, own in sharders().items()}


@case("torchrec.distributed.mc_modules.InferManagedCollisionCollectionSharder")
def the_sharder_of_row_owners() -> Any:
    own = InferManagedCollisionCollectionSharder()
    return own.sharding_types("cuda"), own.module_type is ManagedCollisionCollection, own.qcomm_codecs_registry


@case(f"{BAG}.ShardedQuantFeatureProcessedEmbeddingBagCollection",
      f"{BAG}.ShardedQuantManagedCollisionEmbeddingBagCollection", f"{SEQ}.ShardedQuantEmbeddingCollection",
      f"{SEQ}.ShardedQuantManagedCollisionEmbeddingCollection")  # fmt: skip
def arguments_of_sharded_quantized_collections() -> Any:
    kinds = [
        quant_embeddingbag.ShardedQuantFeatureProcessedEmbeddingBagCollection,
        quant_embeddingbag.ShardedQuantManagedCollisionEmbeddingBagCollection,
        quant_embedding.ShardedQuantManagedCollisionEmbeddingCollection,
    ]
    return {kind.__name__: list(signature(kind.__init__).parameters) for kind in kinds}
