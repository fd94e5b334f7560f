"""From a trained model to one for serving: quantized, pruned, with dicts of tensors; state dicts."""

from typing import Any

import torch
from torchrec import EmbeddingBagCollection
from torchrec.inference.modules import (
    quantize_embeddings,
    quantize_inference_model,
)
from torchrec.quant.embedding_modules import EmbeddingBagCollection as QuantBag
from torchrec.quant.embedding_modules import EmbeddingCollection as QuantSequence

from tests.compat.parity.case import case
from tests.compat.parity.cases.quant import BATCH, bags, sequences

M = "torchrec.inference.modules"


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.pooled, self.rows, self.dense = bags(), sequences(), torch.nn.Linear(2, 2)


@case(f"{M}.quantize_inference_model")
def a_quantized_model() -> Any:
    model = Model()
    served = quantize_inference_model(model)
    return [
        served is model,
        isinstance(served.pooled, QuantBag),
        isinstance(served.rows, QuantSequence),
        type(served.dense),
        served.pooled(BATCH),
        served.rows(BATCH),
    ]


@case(f"{M}.quantize_embeddings")
def a_copy_or_the_model_itself() -> Any:
    model = torch.nn.Sequential(bags())
    copied = quantize_embeddings(model, torch.int8, inplace=False)
    kept = isinstance(model[0], EmbeddingBagCollection)
    changed = quantize_embeddings(model, torch.float16, inplace=True)
    return [copied is model, kept, copied[0](BATCH), changed is model, changed[0](BATCH)]


S = "torchrec.inference.state_dict_transform"
