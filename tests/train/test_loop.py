"""The loop trains the same model on any number of ranks; averages of its weights are those of their formula."""

import pytest
import torch
from sklearn.metrics import roc_auc_score
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import recshard_lab
from recshard_lab.data import RatingsDataset, SyntheticRatings
from recshard_lab.train import Recipe, WeightAverage, evaluate, train_epochs
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


def check(found: jobs.Run, expected: jobs.Run, what: str, rtol: float = 1e-4) -> None:
    """Losses, weights, scores and AUC of a rank are those of the unsharded model."""
    assert found[0] == pytest.approx(expected[0], rel=1e-5), what
    for name, weight in expected[1].items():
        assert torch.allclose(found[1][name], weight, rtol=rtol, atol=1e-5), (what, name)
    assert torch.allclose(found[2], expected[2], rtol=rtol, atol=1e-5), what
    assert found[3] == pytest.approx(expected[3], abs=1e-3), what


@pytest.mark.gate
@pytest.mark.parametrize("world_size", [2, 3])
def test_replicas_train_as_one_process_does(world_size: int) -> None:
    """85 samples in batches of 21: the last batch has one sample, so all ranks but one step on nothing."""
    data = ratings(85)
    expected = jobs.train_plain(jobs.plain_model(data), data)
    with recshard_lab.launch(world_size) as ranks:
        for rank in ranks.run(jobs.replicated, data):
            check(rank, expected, "replicas", rtol=1e-5)


AVERAGED = Recipe(
    embedding_dim=12, over_arch_layer_sizes=(8, 1), batch_size=21, epochs=2, init_max=0.3, average_decay=0.8
)


@pytest.mark.parametrize(
    ("world_size", "recipe", "backend"),
    [
        (2, jobs.RECIPE, None),
        (3, jobs.RECIPE, None),
        pytest.param(2, AVERAGED, "native", marks=pytest.mark.gate),
        pytest.param(2, AVERAGED, None, marks=pytest.mark.gate),
    ],
)
def test_a_recipe_trains_the_same_under_every_scheme(world_size: int, recipe: Recipe, backend: str | None) -> None:
    """Each rank averages its own shards. A decay of 0.8 reaches the exponential part within 10 steps."""
    data = ratings(85)
    expected = jobs.unsharded(data, recipe)
    with recshard_lab.launch(world_size) as ranks:
        for scheme in ("table_wise", "row_wise", "column_wise", "data_parallel"):
            results = ranks.run(jobs.sharded, data, recipe, scheme, backend)
            for rank in results:
                check(rank, expected, scheme)
                for name, weight in results[0][1].items():
                    assert torch.equal(rank[1][name], weight), f"{scheme}: replicas of {name} differ"


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


def walk(model: nn.Module, average: WeightAverage, steps: int) -> list[list[torch.Tensor]]:
    """Redraws the weights at each step; what they were."""
    torch.manual_seed(3)
    seen = []
    for _ in range(steps):
        for parameter in model.parameters():
            nn.init.normal_(parameter)
        average.update()
        seen.append([parameter.detach().clone() for parameter in model.parameters()])
    return seen


def test_a_short_run_is_averaged_evenly() -> None:
    model = nn.Linear(4, 3)
    average = WeightAverage(model, decay=0.9)
    seen = walk(model, average, 10)
    average.copy_to_model()
    for position, weight in enumerate(model.parameters()):
        expected = torch.stack([weights[position] for weights in seen]).mean(0)
        assert torch.allclose(weight, expected, atol=1e-6)


def test_a_long_run_is_torchs_exponential_average_from_the_even_one_on() -> None:
    model = nn.Linear(4, 3)
    average = WeightAverage(model, decay=0.9)
    seen = walk(model, average, 60)
    average.copy_to_model()
    twin = nn.Linear(4, 3)
    for position, weight in enumerate(twin.parameters()):
        nn.init.zeros_(weight)
        weight.data += torch.stack([weights[position] for weights in seen[:10]]).mean(0)
    reference = AveragedModel(twin, multi_avg_fn=get_ema_multi_avg_fn(0.9))  # type: ignore[no-untyped-call]
    reference.update_parameters(twin)  # the first call copies
    for weights in seen[10:]:
        for weight, value in zip(twin.parameters(), weights, strict=True):
            weight.data.copy_(value)
        reference.update_parameters(twin)
    for ours, theirs in zip(model.parameters(), reference.module.parameters(), strict=True):
        assert torch.allclose(ours, theirs, atol=1e-6)


def test_weights_in_fp16_are_averaged_in_fp32() -> None:
    model = nn.Linear(1, 1, bias=False).half()
    average = WeightAverage(model, decay=0.9995)
    for value, steps in ((1.0, 2000), (2.0, 100)):
        nn.init.constant_(model.weight, value)
        for _ in range(steps):
            average.update()  # the last ones move the mean by less than half a step of fp16
    average.copy_to_model()
    assert model.weight.dtype == torch.float16
    assert model.weight.item() == pytest.approx(2 - 0.9995**100, abs=1e-3)


@pytest.mark.parametrize("decay", [-0.1, 1.1, float("nan")])
def test_a_decay_outside_0_to_1_is_refused(decay: float) -> None:
    with pytest.raises(ValueError, match=r"decay must be in \[0, 1\], got"):
        WeightAverage(nn.Linear(2, 2), decay)


@pytest.mark.gate
def test_a_recipe_leaves_the_average_of_its_steps() -> None:
    data = ratings(85)
    plain = Recipe(embedding_dim=8, over_arch_layer_sizes=(8, 1), batch_size=21, epochs=2, average_decay=None)
    even = Recipe(embedding_dim=8, over_arch_layer_sizes=(8, 1), batch_size=21, epochs=2, average_decay=1.0)
    model, averaged = plain.model(data), even.model(data)
    seen: list[dict[str, torch.Tensor]] = []
    plain.train(model, data, lambda _: seen.append({n: w.clone() for n, w in model.state_dict().items()}))
    result = even.train(averaged, data)
    assert len(seen) == len(result.losses) == 10
    for name, weight in averaged.state_dict().items():
        expected = torch.stack([weights[name] for weights in seen]).mean(0)
        assert torch.allclose(weight, expected, atol=1e-6), name
        assert not torch.allclose(weight, model.state_dict()[name], atol=1e-4), name
