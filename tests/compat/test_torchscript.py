"""TorchScript of models under TorchRec's names is refused with its replacement."""

import pytest
import torch
from torch import nn

import recshard_lab as rs
from recshard_lab.compat.inference.modules import quantize_inference_model
from recshard_lab.compat.tracer import Tracer


@pytest.mark.parametrize("pooled", [True, False])
def test_a_traced_quantized_model_runs_and_is_not_scripted(pooled: bool) -> None:
    batch = rs.KeyedJaggedTensor(["f"], torch.tensor([0, 9, 3]), lengths=torch.tensor([2, 1]))
    if pooled:
        tables: nn.Module = rs.EmbeddingBagCollection([rs.EmbeddingBagConfig(10, 8, "t", feature_names=["f"])])
    else:
        tables = rs.EmbeddingCollection([rs.EmbeddingConfig(10, 8, "t", feature_names=["f"])])
    model = quantize_inference_model(nn.Sequential(tables))
    traced = torch.fx.GraphModule(model, Tracer().trace(model))
    theirs, ours = (found(batch)["f"] for found in (traced, model))
    assert torch.equal(*((theirs, ours) if pooled else (theirs.values(), ours.values())))
    with (
        pytest.warns(DeprecationWarning, match="torch.jit.script"),
        pytest.raises(ValueError, match=r"does not compile Embedding\w*Collection.* call torch.export.export"),
    ):
        torch.jit.script(traced)
