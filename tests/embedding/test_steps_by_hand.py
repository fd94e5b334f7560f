"""Rows whose gradients cancel, rows of zeros, and rows that are clipped and decayed: steps by hand."""

import pytest
import torch

from recshard_lab import EmbeddingBagConfig, FusedEmbeddingBagCollection, KeyedJaggedTensor
from recshard_lab.embedding.kernels import available, kernel_named
from recshard_lab.embedding.optimizers import OptimizerSpec
from tests.embedding.lookups import can


def stepped(optimizer: str, start: torch.Tensor, **settings: float) -> torch.Tensor:
    """Weights after a batch that uses row 1 with +1 and with -1, row 2 with +1, and no other row."""
    table = EmbeddingBagConfig(name="t", num_embeddings=4, embedding_dim=4, feature_names=["f"])
    collection = FusedEmbeddingBagCollection([table], optimizer, {"learning_rate": 0.1, **settings}, backend="native")
    collection.load_state_dict({"embedding_bags.t.weight": start})
    batch = KeyedJaggedTensor(["f"], torch.tensor([1, 1, 2]), lengths=torch.tensor([1, 1, 1]))
    (collection(batch).values() * torch.tensor([[1.0], [-1.0], [1.0]])).sum().backward()
    return collection.embedding_bags["t"].weight.detach().clone()


START = torch.tensor([[1.0] * 4, [2.0] * 4, [3.0] * 4, [4.0] * 4])


@pytest.mark.parametrize("optimizer", ["lars_sgd", "lamb", "partial_row_wise_lamb"])
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_a_row_whose_gradients_cancel_is_stepped_by_its_decay_alone(optimizer: str, decay: float) -> None:
    more = {"momentum": 0.9, "eta": 0.01} if optimizer == "lars_sgd" else {"eps": 0.01}
    after = stepped(optimizer, START, weight_decay=decay, **more)
    assert after.isfinite().all()
    assert torch.equal(after[[0, 3]], START[[0, 3]])
    assert not torch.equal(after[2], START[2])
    # LARS: ratio 1 where the gradient is zero; LAMB: |w| / |decay w| = 1 / decay, and 1 where that is zero
    ratio = 1.0 if optimizer == "lars_sgd" or decay == 0 else 1 / decay
    torch.testing.assert_close(after[1], START[1] * (1 - 0.1 * ratio * decay))


@pytest.mark.parametrize("optimizer", ["lars_sgd", "lamb", "partial_row_wise_lamb"])
def test_a_row_of_zeros_learns(optimizer: str) -> None:
    more = {"momentum": 0.0, "eta": 0.01} if optimizer == "lars_sgd" else {"eps": 1e-6}
    after = stepped(optimizer, torch.zeros(4, 4), **more)
    assert after.isfinite().all()
    torch.testing.assert_close(after[2], torch.full((4,), -0.1), rtol=1e-4, atol=1e-6)


CUT = {"learning_rate": 0.1, "eps": 1e-8, "weight_decay": 0.1, "gradient_clipping": True, "max_gradient": 0.5}
ADDING_DECAY = [
    (backend, optimizer)
    for backend in available()
    for optimizer in ("exact_sgd", "exact_adagrad", "exact_row_wise_adagrad")
    if can(kernel_named(backend), OptimizerSpec.from_fused_params({"optimizer": optimizer, **CUT}))
]


@pytest.mark.parametrize(("backend", "optimizer"), ADDING_DECAY)
def test_gradients_are_clipped_before_weight_decay_is_added(backend: str, optimizer: str) -> None:
    table = EmbeddingBagConfig(name="t", num_embeddings=4, embedding_dim=4, feature_names=["f"])
    collection = FusedEmbeddingBagCollection([table], optimizer, dict(CUT), backend=backend)
    collection.load_state_dict({"embedding_bags.t.weight": 10 * START})
    for _ in range(2):
        batch = KeyedJaggedTensor(["f"], torch.tensor([1]), lengths=torch.tensor([1]))
        (collection(batch).values() * 2.0).sum().backward()
    weight, total = 20.0, 0.0
    for _ in range(2):
        gradient = 0.5 + 0.1 * weight  # 2.0 is cut to 0.5, and decay comes on top
        total += gradient**2
        weight -= 0.1 * gradient / (1.0 if optimizer == "exact_sgd" else total**0.5)
    after = collection.embedding_bags["t"].weight.detach()
    torch.testing.assert_close(after[1], torch.full((4,), weight), rtol=1e-6, atol=1e-6)
