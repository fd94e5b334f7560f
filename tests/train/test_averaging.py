"""The average of the weights is the mean it says, and the same under every sharding scheme."""

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import recshard_lab
from recshard_lab.data import RatingsDataset, SyntheticRatings
from recshard_lab.train import Recipe, WeightAverage
from tests.train import jobs


def ratings() -> RatingsDataset:
    return SyntheticRatings(400, num_users=30, num_movies=40).select(torch.arange(85))


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


@pytest.mark.parametrize("decay", [-0.1, 1.1, float("nan")])
def test_a_decay_outside_0_to_1_is_refused(decay: float) -> None:
    with pytest.raises(ValueError, match=r"decay must be in \[0, 1\], got"):
        WeightAverage(nn.Linear(2, 2), decay)


@pytest.mark.gate
def test_a_recipe_leaves_the_average_of_its_steps() -> None:
    data = ratings()
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


@pytest.mark.gate
@pytest.mark.parametrize("backend", ["native", None])
def test_averaged_sharded_weights_equal_averaged_unsharded_ones(backend: str | None) -> None:
    """Each rank averages its own rectangles; a decay of 0.8 reaches the exponential part within 10 steps."""
    data = ratings()
    recipe = Recipe(
        embedding_dim=12, over_arch_layer_sizes=(8, 1), batch_size=21, epochs=2, init_max=0.3, average_decay=0.8
    )
    losses, weights, scores, auc = jobs.unsharded(data, recipe)
    with recshard_lab.launch(2) as ranks:
        for scheme in ("table_wise", "row_wise", "column_wise", "data_parallel"):
            results = ranks.run(jobs.sharded, data, recipe, scheme, backend)
            for rank in results:
                assert rank[0] == pytest.approx(losses, rel=1e-5), scheme
                assert torch.allclose(rank[2], scores, rtol=1e-4, atol=1e-5), scheme
                assert rank[3] == pytest.approx(auc, abs=1e-3)
                for name, weight in weights.items():
                    assert torch.allclose(rank[1][name], weight, rtol=1e-4, atol=1e-5), (scheme, name)
                    assert torch.equal(rank[1][name], results[0][1][name]), f"{scheme}: replicas of {name} differ"
