"""The loop trains the same model whatever the number of ranks, and says what it did."""

import pytest
import torch
from sklearn.metrics import roc_auc_score
from torch.nn.functional import binary_cross_entropy_with_logits

import recshard_lab
from recshard_lab.data import RatingsDataset, SyntheticRatings
from recshard_lab.train import evaluate, train_epochs
from tests.train import jobs


def ratings(count: int) -> RatingsDataset:
    data = SyntheticRatings(400, num_users=30, num_movies=40)
    return data.select(torch.arange(count))


def test_an_epoch_is_plain_sgd_over_the_batches() -> None:
    data = ratings(50)
    model, twin = jobs.plain_model(data), jobs.plain_model(data)
    result = train_epochs(model, data, torch.optim.SGD(model.parameters(), lr=0.5), batch_size=21, seed=4)
    losses = []
    for batch in data.batches(21, shuffle=True, seed=4):
        loss = binary_cross_entropy_with_logits(twin(batch.dense_features, batch.sparse_features)[:, 0], batch.labels)
        grads = torch.autograd.grad(loss, list(twin.parameters()))
        with torch.no_grad():
            for parameter, grad in zip(twin.parameters(), grads, strict=True):
                parameter -= 0.5 * grad
        losses.append(float(loss.detach()))
    assert result.losses == pytest.approx(losses, rel=1e-5)
    assert result.samples == 50
    assert result.samples_per_second == pytest.approx(50 / result.seconds)
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.allclose(ours, theirs, atol=1e-6)


@pytest.mark.gate
@pytest.mark.parametrize("world_size", [2, 3])
def test_replicas_train_as_one_process_does(world_size: int) -> None:
    """85 samples in batches of 21: the last batch has one sample, so all ranks but one step on nothing."""
    data = ratings(85)
    losses, weights, scores, auc = jobs.train_plain(jobs.plain_model(data), data)
    with recshard_lab.launch(world_size) as ranks:
        for rank in ranks.run(jobs.replicated, data):
            assert rank[0] == pytest.approx(losses, rel=1e-5)
            for name, weight in weights.items():
                assert torch.allclose(rank[1][name], weight, atol=1e-5), name
            assert torch.allclose(rank[2], scores, atol=1e-5)
            assert rank[3] == pytest.approx(auc, abs=1e-3)


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_recipe_trains_the_same_under_every_scheme(world_size: int) -> None:
    data = ratings(85)
    losses, weights, scores, _ = jobs.unsharded(data, jobs.RECIPE)
    with recshard_lab.launch(world_size) as ranks:
        for scheme in ("table_wise", "row_wise", "column_wise", "data_parallel"):
            for rank in ranks.run(jobs.sharded, data, jobs.RECIPE, scheme):
                assert rank[0] == pytest.approx(losses, rel=1e-5), scheme
                assert torch.allclose(rank[2], scores, rtol=1e-4, atol=1e-5), scheme
                for name, weight in weights.items():
                    assert torch.allclose(rank[1][name], weight, rtol=1e-4, atol=1e-5), (scheme, name)


def test_evaluation_measures_every_sample_in_order() -> None:
    data = ratings(85)
    model = jobs.plain_model(data)
    model.train()
    found = evaluate(model, data, batch_size=10)
    assert model.training
    batch = next(data.batches(85))
    with torch.no_grad():
        expected = model(batch.dense_features, batch.sparse_features)[:, 0]
    assert torch.allclose(found.scores, expected, atol=1e-6)
    assert found.auc == pytest.approx(roc_auc_score(data.label.numpy(), expected.numpy()), abs=1e-6)


def test_on_step_hears_every_step() -> None:
    data = ratings(50)
    heard = []
    result = train_epochs(jobs.plain_model(data), data, None, epochs=2, batch_size=21, on_step=heard.append)
    expected = [(1, 0, 21), (2, 0, 21), (3, 0, 8), (4, 1, 21), (5, 1, 21), (6, 1, 8)]
    assert [(step.number, step.epoch, step.samples) for step in heard] == expected
    assert {step.total for step in heard} == {6}
    assert [float(step.loss) for step in heard] == pytest.approx(result.losses)


def test_nothing_to_train_on_is_refused() -> None:
    data = ratings(5)
    model = jobs.plain_model(data)
    with pytest.raises(ValueError, match="nothing to train on: 5 samples in batches of 8, 1 epochs"):
        train_epochs(model, data, None, batch_size=8, drop_last=True)
    with pytest.raises(ValueError, match="0 epochs"):
        train_epochs(model, data, None, epochs=0)
