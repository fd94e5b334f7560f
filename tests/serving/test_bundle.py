"""A bundle answers what the model answered, bit for bit, here and in a process without this library."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from recshard_lab import (
    DLRM,
    DynamicEmbeddingBagCollection,
    DynamicEmbeddingConfig,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    KeyedJaggedTensor,
    KeyedTensor,
    PoolingType,
    quantize_embeddings,
)
from recshard_lab.embedding import DataType, export_static
from recshard_lab.models import (
    DLRM_DCN,
    DeepFMNN,
    FeatureProcessedEmbeddingBagCollection,
    PositionWeightedModuleCollection,
    SimpleDeepFMNN,
    TwoTower,
)
from recshard_lab.serving import Batch, BundleError, ExportError, Inputs, Servable, load_bundle, save_bundle
from tests.serving.bundles import COLUMNS, batch_of, dlrm, tables

SIZES = [(0, 3), (1, 0), (1, 3), (2, 0), (2, 1), (64, 5)]


def bags(**more: Any) -> EmbeddingBagCollection:
    return EmbeddingBagCollection(tables(), **more)


def several_formats() -> EmbeddingBagCollection:
    mean = EmbeddingBagConfig(50, 4, "a", feature_names=["x"], pooling=PoolingType.MEAN)
    half = EmbeddingBagConfig(50, 4, "b", DataType.FP16, feature_names=["x", "y"])
    return EmbeddingBagCollection([mean, half])


def positions() -> nn.Module:
    weights = PositionWeightedModuleCollection({f"f{i}": 8 for i in range(3)})
    return FeatureProcessedEmbeddingBagCollection(bags(is_weighted=True), weights)


def vocabulary() -> nn.Module:
    configs = [
        DynamicEmbeddingConfig(f"t{i}", 8, capacity=64, feature_names=[f"f{i}"], absent=absent)
        for i, absent in enumerate(["zero", "initial"])
    ]
    dynamic = DynamicEmbeddingBagCollection(configs, torch.optim.SGD, {"lr": 0.5})
    inputs = Inputs.of(dynamic)
    batch = Batch(torch.zeros(2, 0), torch.tensor([3, 7, -9, 4]), torch.ones(4, dtype=torch.int64))
    dynamic(batch.to_keyed_jagged(inputs)).values().sum().backward()
    return export_static(dynamic)


class Sequences(nn.Module):
    """Sums of each sample's rows."""

    def __init__(self) -> None:
        super().__init__()
        configs = [EmbeddingConfig(50 + i, 8, f"t{i}", feature_names=[f"f{i}"]) for i in range(3)]
        self.collection = EmbeddingCollection(configs)

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        rows = self.collection(features).values()
        sums = [torch.segment_reduce(each.values(), "sum", lengths=each.lengths(), unsafe=True) for each in rows]
        return torch.cat(sums, 1)


MIXED = {"t0": "int4", "t1": "bf16", "t2": "fp8"}  # fbgemm has no kernel for bf16

BY_DAY = ("dlrm", "weighted", "vocabulary", "int8", "native")

MODELS: dict[str, Callable[[], nn.Module]] = {
    "dlrm": dlrm,
    "weighted": lambda: dlrm(weighted=True),
    "no dense columns": lambda: DLRM(bags(), 0, [], [8, 1]),
    "dcn": lambda: DLRM_DCN(bags(), 3, [8, 8], [8, 1], 2, 4),
    "simple deepfm": lambda: SimpleDeepFMNN(3, bags(), 8, 4),
    "deepfm": lambda: DeepFMNN(bags(), 3, [8, 1]),
    "two towers": lambda: TwoTower(bags(), [8, 8]),
    "clamp": lambda: bags(out_of_range="clamp"),
    "ignore": lambda: bags(out_of_range="ignore"),
    "mean and fp16": several_formats,
    "positions": positions,
    "vocabulary": vocabulary,
    "int8": lambda: quantize_embeddings(dlrm(), "int8"),
    "int4 weighted": lambda: quantize_embeddings(dlrm(weighted=True), "int4"),
    "int8 shared features": lambda: quantize_embeddings(several_formats(), "int8"),
    "several kernels": lambda: quantize_embeddings(dlrm(out_of_range="clamp"), MIXED),
    "native": lambda: quantize_embeddings(dlrm(), {**MIXED, "t1": "int2"}, backend="native"),
    "int8 sequences": lambda: quantize_embeddings(Sequences(), "int8"),
    "sequences of several kernels": lambda: quantize_embeddings(Sequences(), MIXED),
}


def answer_of(model: nn.Module, inputs: Inputs, batch: Batch) -> list[Tensor]:
    with torch.no_grad():
        features = batch.to_keyed_jagged(inputs)
        answer = model(batch.dense, features) if inputs.dense or isinstance(model, DLRM) else model(features)
    columns = answer if isinstance(answer, tuple) else (answer.values() if isinstance(answer, KeyedTensor) else answer,)
    return [column.squeeze(1) if column.shape[1] == 1 else column for column in columns]


def saved(name: str, folder: Path) -> tuple[nn.Module, Inputs]:
    torch.manual_seed(0)
    model = MODELS[name]().eval()
    takes_dense = isinstance(model, (DLRM_DCN, DeepFMNN, SimpleDeepFMNN)) or "dense_arch" in dir(model)
    dense = COLUMNS if takes_dense and name != "no dense columns" else ()
    inputs = Inputs.of(model, dense)
    save_bundle(model, folder, inputs=inputs, outputs=["query", "candidate"] if name == "two towers" else ["score"])
    return model, inputs


def run_alone(code: str, *arguments: object) -> str:
    """Runs code in a process that cannot import this library, nor safetensors."""
    block = (
        "import sys\n"
        "class Block:\n"
        "    def find_spec(self, name, *rest):\n"
        "        if name.partition('.')[0] in ('recshard_lab', 'safetensors'):\n"
        "            raise ImportError(name + ' is blocked')\n"
        "sys.meta_path.insert(0, Block())\n"
    )
    command = [sys.executable, "-I", "-c", block + code, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


Saved = tuple[nn.Module, Inputs, Path]


@pytest.fixture(scope="module")
def bundle_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Saved]:
    """Saves the bundle of a model once. No test changes it."""
    root, known = tmp_path_factory.mktemp("bundles"), dict[str, Saved]()

    def get(name: str) -> Saved:
        if name not in known:
            known[name] = (*saved(name, root / name), root / name)
        return known[name]

    return get


@pytest.fixture
def folder(bundle_of: Callable[[str], Saved]) -> Path:
    """A bundle of a DLRM."""
    return bundle_of("dlrm")[2]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in BY_DAY else [pytest.mark.gate]) for name in MODELS]
)
def test_a_bundle_answers_bit_for_bit_at_every_size(bundle_of: Callable[[str], Saved], name: str) -> None:
    model, inputs, path = bundle_of(name)
    loaded = load_bundle(path, check_hashes=True)
    assert isinstance(loaded, Servable)
    assert loaded.inputs == inputs
    for size, most in SIZES:
        batch = batch_of(inputs, size, most)
        answer = loaded.predict(batch)
        expected = answer_of(model, inputs, batch)
        assert list(answer) == list(loaded.outputs)
        assert all(torch.equal(a, b) for a, b in zip(answer.values(), expected, strict=True)), (size, most)


@pytest.mark.gate
def test_bundles_answer_bit_for_bit_without_this_library(bundle_of: Callable[[str], Saved], tmp_path: Path) -> None:
    """All models in one process, because importing torch takes most of the time."""
    expected, folders = {}, []
    for name in MODELS:
        model, inputs, path = bundle_of(name)
        batches = [batch_of(inputs, *size) for size in SIZES]
        torch.save([list(vars(each).values()) for each in batches], tmp_path / f"{name}.batches")
        expected[name] = [answer_of(model, inputs, each) for each in batches]
        folders.append(path)
    code = (
        "import pathlib, runpy, torch\n"
        "root = pathlib.Path(sys.argv[1])\n"
        "for folder in map(pathlib.Path, sys.argv[2:]):\n"
        "    answer = runpy.run_path(str(folder / 'answer.py'))['answer']\n"
        "    answers = [list(answer(*batch)) for batch in torch.load(root / (folder.name + '.batches'))]\n"
        "    torch.save(answers, root / (folder.name + '.answers'))\n"
        "print('recshard_lab' in sys.modules)\n"
        "runpy.run_path(sys.argv[2] + '/answer.py', run_name='__main__')\n"
    )
    imported, _, example = run_alone(code, tmp_path, *folders).partition("\n")
    assert imported == "False"
    of_example = load_bundle(folders[0]).predict(Batch(**load_file(folders[0] / "example.safetensors")))
    assert torch.equal(torch.tensor(json.loads(example)["score"]), of_example["score"])
    for name in MODELS:
        for answer, wanted in zip(torch.load(tmp_path / f"{name}.answers"), expected[name], strict=True):
            assert all(torch.equal(a, b) for a, b in zip(answer, wanted, strict=True)), name


class SharedLayer(nn.Module):
    """One layer under two names, and a tensor that the first forward computes."""

    scale: Tensor | None = None

    def __init__(self) -> None:
        super().__init__()
        self.bags, self.first = bags(), nn.Linear(24, 24)
        self.second = self.first

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        if self.scale is None:
            self.scale = torch.arange(24.0)
        answer: Tensor = self.second(self.first(self.bags(features).values()) * self.scale)
        return answer


class TiedWeight(nn.Module):
    """One weight in two modules."""

    def __init__(self) -> None:
        super().__init__()
        self.bags, self.first, self.second = bags(), nn.Linear(24, 24), nn.Linear(24, 24)
        self.second.weight = self.first.weight

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        answer: Tensor = self.second(self.first(self.bags(features).values()))
        return answer


class Decides(SharedLayer):
    """Cannot be exported."""

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        answer = super().forward(features)
        return answer if answer.sum() > 0 else -answer


Named = dict[str, tuple[nn.Parameter, Tensor]]


def weights_and_numbers(model: nn.Module) -> Named:
    """By every name: the weight and a copy of its numbers."""
    named = model.named_parameters(remove_duplicate=False)
    return {name: (weight, weight.detach().clone()) for name, weight in named}


def check_weights(model: nn.Module, own: Named) -> None:
    """The model has the same objects with the same numbers, and trains with them."""
    left = dict(model.named_parameters(remove_duplicate=False))
    assert list(left) == list(own)
    for name, (weight, numbers) in own.items():
        assert left[name] is weight, name
        assert torch.equal(weight, numbers), name
    model(batch_of(Inputs.of(model), 4).to_keyed_jagged(Inputs.of(model))).sum().backward()
    assert all(weight.grad is not None for weight in left.values())


@pytest.mark.parametrize("make", [SharedLayer, TiedWeight])
def test_a_model_with_shared_parts_is_saved_and_stays_as_it_was(make: type[nn.Module], tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = make().eval()
    inputs, own = Inputs.of(model), weights_and_numbers(model)
    save_bundle(model, tmp_path / "1", inputs=inputs)
    check_weights(model, own)
    batch = batch_of(inputs, 4)
    assert torch.equal(load_bundle(tmp_path / "1").predict(batch)["score"], answer_of(model, inputs, batch)[0])
    assert set(load_file(tmp_path / "1" / "weights.safetensors")) == {name for name, _ in model.named_parameters()}
    assert (tmp_path / "1" / "program.pt2").stat().st_size < 100_000  # no weights


def test_a_model_that_cannot_be_exported_stays_as_it_was(tmp_path: Path) -> None:
    model = Decides().eval()
    own = weights_and_numbers(model)
    with pytest.raises(ExportError, match="its forward decides by the numbers of a batch"):
        save_bundle(model, tmp_path / "1", inputs=Inputs.of(model))
    assert model.scale is None
    check_weights(model, own)


def test_a_quantized_bundle_has_the_bytes_of_its_tables_once(tmp_path: Path) -> None:
    tables = [EmbeddingBagConfig(20_000, 64, f"t{i}", feature_names=[f"f{i}"]) for i in range(2)]
    exact = EmbeddingBagCollection(tables).eval()
    sizes = {}
    for name, model in {"fp32": exact, "int8": quantize_embeddings(exact, "int8")}.items():
        save_bundle(model, tmp_path / name, inputs=Inputs.of(model))
        sizes[name] = sum(path.stat().st_size for path in (tmp_path / name).iterdir())
    assert sizes["int8"] <= 0.3 * sizes["fp32"]
    assert (tmp_path / "int8" / "program.pt2").stat().st_size < 200_000
    (tables_in_file,) = load_bundle(tmp_path / "int8")._weights.values()  # type: ignore[attr-defined]
    assert tables_in_file.untyped_storage().nbytes() == (tmp_path / "int8" / "weights.safetensors").stat().st_size


@pytest.mark.parametrize("name", ["int8", "native"])
def test_ids_outside_a_quantized_table_are_refused(bundle_of: Callable[[str], Saved], name: str) -> None:
    _, inputs, path = bundle_of(name)
    loaded = load_bundle(path)
    for wrong in (-1, 50):
        batch = batch_of(inputs, 3)
        batch.values[0] = wrong
        with pytest.raises(RuntimeError, match="an id is not a row of its table"):
            loaded.predict(batch)


def test_a_bundle_names_no_path_of_the_machine_that_wrote_it(folder: Path) -> None:
    import zipfile

    with zipfile.ZipFile(folder / "program.pt2") as archive:
        text = b"".join(archive.read(name) for name in archive.namelist())
    assert str(Path(__file__).parents[2]).encode() not in text


def test_ids_outside_a_table_are_refused_by_the_program(folder: Path) -> None:
    loaded = load_bundle(folder)
    batch = batch_of(loaded.inputs, 3)
    batch.values[0] = 50
    with pytest.raises(RuntimeError, match="feature 'f0' has an id that is not a row of table 't0'"):
        loaded.predict(batch)
    with pytest.raises(ValueError, match="the model takes float32"):
        loaded.predict(Batch(batch.dense[:, :1], batch.values, batch.lengths))


def test_threads_may_predict_at_the_same_time(folder: Path) -> None:
    loaded = load_bundle(folder)
    batches = [batch_of(loaded.inputs, 1 + number % 7, seed=number) for number in range(64)]
    alone = [loaded.predict(batch)["score"] for batch in batches]
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(lambda batch: loaded.predict(batch)["score"], batches))
    assert all(torch.equal(a, b) for a, b in zip(alone, together, strict=True))
    assert all(answer.is_inference() for answer in together)


def test_a_process_that_only_serves_loads_operators_of_fbgemm_and_no_training_code(
    bundle_of: Callable[[str], Saved],
) -> None:
    *_, path = bundle_of("int8")
    assert json.loads((path / "model.json").read_text())["stages"][0]["imports"] == ["fbgemm_gpu"]
    code = (
        "import sys; from recshard_lab.serving import load_bundle; from recshard_lab.serving.server import process; "
        "print(load_bundle(sys.argv[1]).outputs); "
        "print([name for name in sys.modules if name in ('recshard_lab.distributed', 'recshard_lab.embedding')])"
    )
    done = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=True)
    assert done.stdout == "('score',)\n[]\n"


FULL = """
import resource, sys
from pathlib import Path
import torch
from recshard_lab import EmbeddingBagCollection, EmbeddingBagConfig
from recshard_lab.serving import Inputs, load_bundle, save_bundle
from tests.serving.bundles import batch_of
root = Path(sys.argv[1])
model = EmbeddingBagCollection([EmbeddingBagConfig(5000, 8, "t", feature_names=["f"])]).eval()
inputs = Inputs.of(model)
save_bundle(model, root / "1", inputs=inputs)
batch = batch_of(inputs, 3)
expected = load_bundle(root / "1").predict(batch)["score"]
with torch.no_grad():
    model.embedding_bags["t"].weight.zero_()
for limit in (0, 10_000, 100_000):  # nothing, a part of the program, a part of the weights
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, -1))  # the kernel refuses more, as a full disk does
    for name in ("1", "2"):
        try:
            save_bundle(model, root / name, inputs=inputs)
        except OSError as error:
            print(error)
assert torch.equal(load_bundle(root / "1", check_hashes=True).predict(batch)["score"], expected)
print([path.name for path in root.iterdir()])
"""


@pytest.mark.gate
def test_a_full_disk_is_named_and_the_process_and_the_old_bundle_stay(tmp_path: Path) -> None:
    command = [sys.executable, "-W", "ignore", "-c", FULL, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stderr
    why = "could not be saved: File too large. Fix: free disk space"
    full = [f"[Errno 27] {tmp_path / name} {why}" for name in ("1", "2")]
    assert done.stdout.splitlines() == [*full * 3, "['1']"]
    assert 10_000 < (tmp_path / "1" / "program.pt2").stat().st_size < 100_000


def test_damage_is_found(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "1")
    weights = tmp_path / "1" / "weights.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    load_bundle(tmp_path / "1")  # sizes alone
    with pytest.raises(BundleError, match=r"weights.safetensors is damaged"):
        load_bundle(tmp_path / "1", check_hashes=True)
    weights.write_bytes(content[:-1])
    with pytest.raises(BundleError, match=r"weights.safetensors is truncated"):
        load_bundle(tmp_path / "1")
    with pytest.raises(BundleError, match="no bundle at"):
        load_bundle(tmp_path / "2")
