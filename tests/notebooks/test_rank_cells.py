"""Cells of notebooks that run on ranks, and recipes, leave no tensor on the CPU where ranks have another device."""

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest

import recshard_lab as rs
from recshard_lab.data import SyntheticRatings
from recshard_lab.lab import SchemeSwitcher, measure_plan
from recshard_lab.lab.demo.experiment import plan_of_scheme, run_under
from recshard_lab.selftest import checks, on_ranks
from recshard_lab.train import Recipe
from tests.notebooks import rank_cells
from tests.notebooks.runs import FOLDER

NOTEBOOKS = {path.stem: path for path in sorted(FOLDER.glob("*.ipynb")) if rank_cells.world_size(path)}
SLOW = ("01_shard_your_first_model", "15_the_training_pipeline")  # tests below run their model and pipelines
QUICK: dict[str, Any] = {  # in place of 60 to 80 steps
    "recipe": Recipe(epochs=1, batch_size=20_000),
    "course": {"epochs": 1, "batch_size": 500},
}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """As many ranks as any notebook launches. Only they have the ledger device. Files go elsewhere."""
    with contextlib.chdir(tmp_path_factory.mktemp("cells")), rs.launch(4, nodes=2, devices="cpu") as launched:
        launched.run(rank_cells.prepare)
        yield launched


@pytest.mark.gate
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.nightly] if name in SLOW else []) for name in NOTEBOOKS]
)
def test_rank_cells_put_every_tensor_on_the_ranks_device(ranks: Any, name: str) -> None:
    cells = rank_cells.sources(NOTEBOOKS[name])
    found = rank_cells.run_on_ledger(cells, ranks, **QUICK)
    assert not found.on_cpu
    assert found.cells == [number for number, (source, _) in enumerate(cells) if rank_cells.on_ranks(source)]
    assert set(found.waits) == set(found.cells)


MODEL = """%%recshard
import recshard_lab as rs
table = rs.EmbeddingBagConfig(10, 4, name="t", feature_names=["f"])
model = rs.DistributedModelParallel(rs.EmbeddingBagCollection([table]))
ids = torch.arange(4{})
batch = rs.KeyedJaggedTensor(["f"], ids, lengths=torch.ones_like(ids))
out = model(batch).values()"""

WRONG = {
    "a tensor": ("%%recshard\nx = torch.ones(3)", "x (torch.float32 [3])"),
    "a module": ("%%recshard\nlayer = torch.nn.Linear(2, 1, bias=False)", "layer.weight (torch.float32 [1, 2])"),
    "a batch of ids": (
        "%%recshard\nimport recshard_lab as rs\n"
        "kjt = rs.KeyedJaggedTensor(['f'], torch.arange(2), lengths=torch.ones(2).long())",
        "kjt.values() (torch.int64 [2])",
    ),
    "an argument of a collective": (
        "%%recshard\ndist.all_reduce(torch.ones(2))",
        "all_reduce: its argument (torch.float32 [2])",
    ),
    "a batch for a model": (MODEL.format(""), "ids (torch.int64 [4])"),
    "a mixture": (
        "%%recshard\nx = torch.ones(2, device=device) + torch.ones(2)",
        "Expected all tensors to be on",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_cell_that_forgets_the_device_is_named(ranks: Any, name: str) -> None:
    source, message = WRONG[name]
    right = ("%%recshard\nz = torch.ones(1, device=device)", False)
    found = rank_cells.run_on_ledger([right, ("", False), (source, False)], ranks)
    assert list(found.on_cpu) == [2]
    assert any(message in left for left in found.on_cpu[2]), found.on_cpu


def test_cells_that_use_the_device_pass_and_their_waits_are_counted(ranks: Any) -> None:
    cells = [(MODEL.format(", device=device"), False), ("%%recshard\nfirst = out.sum().item()", False)]
    found = rank_cells.run_on_ledger(cells, ranks)
    assert not found.on_cpu
    assert found.waits[1] == 1


def test_recipes_and_pipelines_train_on_the_ranks_device(ranks: Any) -> None:
    """Each of them ends in an error if it hands a CPU tensor to a model on the device."""
    ranks.run(rank_cells.prepare)
    assert {device for device, _, _ in ranks.run(on_ranks.rank_facts)} == {"ledger:0"}
    tables, load = checks.parity_tables(), rs.Workload(16, 3.0)
    plan = checks.plan_under("row_wise", tables, ranks)
    assert set(measure_plan(ranks, plan, tables, load, steps=1).backends.values()) == {"ledger"}
    for one in ranks.run(on_ranks.run_beside_truth, plan.to_json(), tables, load, 1):
        assert one["weights_apart"] < checks.APART
    for losses in ranks.run(on_ranks.pipeline_losses, checks.KINDS, 3):
        assert all(own == losses["plain loop"] for own in losses.values())
    train, test = SyntheticRatings(1000, num_users=50, num_movies=80).split("random", test_fraction=0.2, seed=0)
    recipe = Recipe(over_arch_layer_sizes=(8, 1), epochs=1, batch_size=400)
    assert len(run_under(ranks, plan_of_scheme("row_wise", recipe.tables(train), 4), train, test, recipe).losses) == 2


def test_a_model_on_the_ranks_device_is_trained_and_resharded_from_the_notebook(ranks: Any) -> None:
    ranks.run(rank_cells.prepare)
    ranks.exec(MODEL.format(", device=device").split("\n", 1)[1])
    ranks.exec("def step():\n    loss = model(batch).values().square().mean()\n    loss.backward()\n    return loss")
    switcher = SchemeSwitcher(ranks, "model", "step", workload=rs.Workload(16, 3.0))
    try:
        switcher.set({"t": "row_wise"})
        assert switcher.apply().same
        assert len(switcher.train(2)) == 2
    finally:
        switcher.close()
