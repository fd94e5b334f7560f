"""Every click model equals its plain twin, and is one graph for torch.compile."""

import pytest
import torch

from benchmarks.apparatus.plain_models import twin_of
from tests.distributed import model_jobs


@pytest.mark.gate
@pytest.mark.parametrize("name", model_jobs.MODELS)
def test_a_model_compiles_into_one_graph_and_trains_alike(name: str) -> None:
    torch._dynamo.reset()
    model = model_jobs.model(name)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    batch = model_jobs.batch(0, 0)
    found = []
    for run in (model, compiled):
        model.zero_grad()
        logits = run(batch.dense_features, batch.sparse_features)
        logits.sum().backward()
        found.append([logits, *(parameter.grad for parameter in model.parameters())])
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("name", model_jobs.MODELS)
def test_a_model_equals_its_plain_twin(name: str) -> None:

    model = model_jobs.model(name)
    twin, batch = twin_of(model), model_jobs.batch(1, 0)
    ours = model(batch.dense_features, batch.sparse_features)
    theirs = twin(batch.dense_features, batch.sparse_features)
    assert ours.shape == (6, 1)
    torch.testing.assert_close(ours, theirs)
    for logits in (ours, theirs):
        logits.square().sum().backward()
    grads = {parameter: weight.grad for parameter, weight in twin.weights.items()}
    for key, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, grads[key], rtol=1e-5, atol=1e-5, msg=key)
