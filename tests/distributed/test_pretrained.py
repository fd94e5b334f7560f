"""Pretrained tables: from memory, files and checkpoints, into every scheme, read by rectangles."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch.distributed.checkpoint import save as torch_save_checkpoint

from recshard_lab import (
    DataType,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    FusedEmbeddingBagCollection,
    save_checkpoint,
)
from recshard_lab.distributed.state.pretrained import load_pretrained
from recshard_lab.sharding.schemes import scheme_names
from tests.distributed import cases, state_jobs
from tests.distributed.jobs import Case, Model
from tests.distributed.test_reshard import plan_named

USERS = torch.arange(101 * 16, dtype=torch.float32).view(101, 16) / 7
MOVIES = -torch.arange(37 * 8, dtype=torch.float32).view(37, 8) / 3
TRUTH = {"users": USERS, "movies": MOVIES}
SOURCES = ["tensor", "array", "memmap", "npy", "safetensors", "pt", "checkpoint", "torch's checkpoint"]


def written(kind: str, folder: Path) -> dict[str, Any]:
    """Both tables as a source of this kind; every file is made by its own format's writer."""
    if kind == "tensor":
        return dict(TRUTH)
    if kind == "array":
        return {name: table.numpy().astype(">f4") for name, table in TRUTH.items()}
    if kind in ("npy", "memmap"):
        for name, table in TRUTH.items():
            np.save(folder / f"{name}.npy", table.numpy())
        paths = {name: folder / f"{name}.npy" for name in TRUTH}
        return paths if kind == "npy" else {name: np.load(path, mmap_mode="r") for name, path in paths.items()}
    if kind == "safetensors":
        save_file({f"model.{name}.weight": table for name, table in TRUTH.items()}, folder / "all.safetensors")
        return {"users": folder / "all.safetensors", "movies": (folder / "all.safetensors", "model.movies.weight")}
    if kind == "pt":
        torch.save({"users.weight": USERS, "films": MOVIES, "note": "no tensor"}, folder / "all.pt")
        return {"users": folder / "all.pt", "movies": (str(folder / "all.pt"), "films")}
    if kind == "checkpoint":
        model = Model(Case(cases.TABLES, "", [], seed=3))
        model.load_state_dict({f"collection.embedding_bags.{n}.weight": t for n, t in TRUTH.items()}, strict=False)
        save_checkpoint(folder / "run", model)
    else:
        torch_save_checkpoint({"users": USERS, "emb": {"movies": MOVIES}}, checkpoint_id=folder / "run", no_dist=True)
    return dict.fromkeys(TRUTH, folder / "run")


def key(name: str) -> str:
    return f"collection.embedding_bags.{name}.weight"


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("kind", SOURCES)
def test_every_scheme_has_the_rows_of_every_source_and_the_rest_is_as_it_was(
    two: Any, tmp_path: Path, kind: str
) -> None:
    given = written(kind, tmp_path)
    plans = [plan_named(name, 2) for name in [*scheme_names(), "pinwheel"]]
    case = Case(cases.TABLES, plans[0], [])
    truth = Model(case).state_dict() | {key(name): table for name, table in TRUTH.items()}
    found = two.run(state_jobs.load_given, case, plans, given, None)
    found += two.run(state_jobs.load_given, case, plans, given, 1) if kind in ("tensor", "array") else []
    for each in found:
        for state in each:
            assert state_jobs.same(state, truth) == []


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("kind", SOURCES)
def test_unsharded_collections_of_every_kind_are_filled(tmp_path: Path, kind: str) -> None:
    bags, rows_of = (
        [config(*table.shape, name, feature_names=[name]) for name, table in TRUTH.items()]
        for config in (EmbeddingBagConfig, EmbeddingConfig)
    )
    given = written(kind, tmp_path)
    for collection in (
        EmbeddingBagCollection(bags),
        EmbeddingCollection(rows_of),
        FusedEmbeddingBagCollection(bags, torch.optim.Adagrad, {"lr": 0.1}),
    ):
        load_pretrained(collection, given)
        for name, value in collection.state_dict().items():
            assert torch.equal(value, TRUTH[name.split(".")[1]])


@pytest.mark.parametrize("kind", ["npy", "safetensors", "pt"])
def test_no_rank_holds_more_of_a_file_than_its_rectangles_and_some_blocks(two: Any, tmp_path: Path, kind: str) -> None:
    rows = 250_000  # 64 MB
    tables = [{"name": "users", "num_embeddings": rows, "embedding_dim": 64, "feature_names": ["user"]}]
    for name, value in (("warm", 0.0), ("given", 1.0)):
        table, path = torch.full((rows, 64), value), tmp_path / f"{name}.{kind}"
        {"npy": np.save, "pt": lambda p, t: torch.save(t, p), "safetensors": lambda p, t: save_file({"t": t}, p)}[kind](
            path, table
        )
    paths = [{"users": tmp_path / f"{name}.{kind}"} for name in ("warm", "given")]
    case = Case(tables, cases.plan_of(tables, ["row_wise"], 2).to_json(), [])
    for peak in two.run(state_jobs.pretrained_peak, case, *paths):
        assert peak < 30e6


def model() -> EmbeddingBagCollection:
    tables = [
        EmbeddingBagConfig(num_embeddings=37, embedding_dim=8, name="movies", feature_names=["seen"]),
        EmbeddingBagConfig(
            num_embeddings=4, embedding_dim=8, name="small", feature_names=["few"], data_type=DataType.FP16
        ),
    ]
    return EmbeddingBagCollection(tables)


def file_of(folder: Path, name: str, keep: int | None = None) -> Path:
    """A good file, or its first ``keep`` bytes."""
    path = folder / name
    if path.suffix == ".npy":
        np.save(path, MOVIES.numpy())
    elif path.suffix == ".safetensors":
        save_file({"a": MOVIES, "b": MOVIES + 1}, path)
    elif path.suffix == ".pt":
        torch.save({"a": MOVIES, "b": MOVIES + 1}, path)
    path.write_bytes(path.read_bytes()[:keep])
    return path


BAD = {
    "name": (lambda folder: {"films": MOVIES}, "no table is named 'films': the model has embedding_bags.movies.weight"),
    "shape": (lambda folder: {"movies": USERS}, r"the tensor for table 'movies' is 101 x 16, .* is 37 x 8"),
    "one axis": (lambda folder: {"movies": MOVIES[0]}, "is 8, table 'movies' is 37 x 8"),
    "rounding": (lambda folder: {"movies": MOVIES.double()}, r"is torch.float64, .* is torch.float32.*cast=True"),
    "halves": (lambda folder: {"small": MOVIES[:4]}, "is torch.float32, table 'small' is torch.float16"),
    "integers": (lambda folder: {"movies": MOVIES.long()}, "int64 numbers, expected floating point"),
    "objects": (lambda folder: {"movies": np.empty((37, 8), object)}, "array of object"),
    "sparse": (lambda folder: {"movies": MOVIES.to_sparse()}, "make it dense"),
    "meta": (lambda folder: {"movies": MOVIES.to("meta")}, "on the meta device"),
    "list": (lambda folder: {"movies": [[1.0]]}, "is a list: expected a tensor, an array, a path"),
    "none": (lambda folder: {"movies": None}, "this is the only rank"),
    "absent": (lambda folder: {"movies": folder / "absent.npy"}, "absent.npy does not exist"),
    "kind": (
        lambda folder: {"movies": file_of(folder, "a.safetensors").rename(folder / "a.csv")},
        r"Supported: \.npy",
    ),
    "short npy": (lambda folder: {"movies": file_of(folder, "a.npy", 500)}, r"a\.npy is truncated"),
    "short safetensors": (lambda folder: {"movies": file_of(folder, "a.safetensors", 900)}, r"a\.safetensors is trunc"),
    "short pt": (lambda folder: {"movies": file_of(folder, "a.pt", 900)}, r"a\.pt is truncated"),
    "which": (
        lambda folder: {"movies": file_of(folder, "a.safetensors")},
        r"2 tensors, 0 of them named after",
    ),
    "no such": (lambda folder: {"movies": (file_of(folder, "a.pt"), "c")}, "no tensor 'c', but a, b"),
    "named npy": (lambda folder: {"movies": (file_of(folder, "a.npy"), "c")}, "one array without a name"),
    "empty folder": (lambda folder: {"movies": folder}, r"\.metadata is missing"),
}


@pytest.mark.parametrize("bad", BAD)
def test_what_does_not_fit_is_refused_by_name_and_nothing_changes(tmp_path: Path, bad: str) -> None:
    made, named = BAD[bad]
    bags = model()
    before = {name: value.clone() for name, value in bags.state_dict().items()}
    given = made(tmp_path)
    good = {} if "movies" in given else {"movies": MOVIES}
    with pytest.raises(ValueError, match=named):
        load_pretrained(bags, {**good, **given})
    assert state_jobs.same(before, bags.state_dict()) == []


def test_rounding_happens_when_asked_for() -> None:
    bags = model()
    load_pretrained(bags, {"small": MOVIES[:4], "movies": MOVIES.double()}, cast=True)
    assert torch.equal(bags.embedding_bags["small"].weight, MOVIES[:4].half())
    load_pretrained(bags, {"movies": MOVIES.half()})  # every FP16 number is an FP32 number
    assert torch.equal(bags.embedding_bags["movies"].weight, MOVIES.half().float())


def test_two_tables_of_one_name_are_told_apart_by_their_paths() -> None:
    both = torch.nn.ModuleDict({"left": model(), "right": model()})
    with pytest.raises(ValueError, match=r"2 tables are named 'movies'.*left\.embedding_bags\.movies\.weight"):
        load_pretrained(both, {"movies": MOVIES})
    load_pretrained(both, {"right.embedding_bags.movies.weight": MOVIES})
    assert torch.equal(both["right"].embedding_bags["movies"].weight, MOVIES)
    assert not torch.equal(both["left"].embedding_bags["movies"].weight, MOVIES)


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ([{"users": USERS}, {"movies": MOVIES}], "rank 1 has other tables than rank 0"),
        ([{"users": None}, {"users": None}], "has a source on 0 of 2 ranks"),
        ([{"users": USERS}, {"users": USERS[:5]}], "is 5 x 16"),
    ],
    ids=["tables", "nobody", "one is wrong"],
)
def test_ranks_that_disagree_all_refuse(two: Any, given: list[dict[str, Any]], named: str) -> None:
    case = Case(cases.TABLES, plan_named("grid_shard", 2), [])
    for error, changed in two.run(state_jobs.refused_pretrained, case, given):
        assert named in error
        assert not changed
