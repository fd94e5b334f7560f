"""Preprocessed clicks are what plain Python makes of the same lines; whatever is malformed is told by file and line."""

import gzip
import hashlib
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from recshard_lab.data import BatchLoader, CriteoClicks, build_dataset, preprocess_criteo
from recshard_lab.data.criteo import preprocess, text
from recshard_lab.data.criteo.parse_days import parse
from recshard_lab.data.criteo.text import Chunk
from recshard_lab.data.criteo.work import Settings
from tests.data import criteo_files as files


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text, "CHUNK_BYTES", 10_000)  # some forty lines


def tables_of(monkeypatch: pytest.MonkeyPatch, tables_bytes: int) -> None:
    monkeypatch.setattr(preprocess, "_BESIDES_TABLES", int(0.75e9) - tables_bytes)


def content(folder: Path) -> dict[str, str]:
    """A digest of every file but the manifest, which names the inputs."""
    told = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}
    return {name: digest for name, digest in told.items() if name not in ("manifest.json", "lock")}


@pytest.mark.gate
@pytest.mark.parametrize("form", ["npy", "parquet"])
@pytest.mark.parametrize("zipped", [False, True])
@pytest.mark.parametrize(("threshold", "max_ind_range"), [(1, 0), (3, 0), (3, 50)])
def test_days_follow_torchrecs_rules(
    tmp_path: Path, form: str, zipped: bool, threshold: int, max_ind_range: int
) -> None:
    inputs = files.write(tmp_path / "in", zipped=zipped)
    made = preprocess_criteo(inputs, tmp_path / "out", threshold=threshold, max_ind_range=max_ind_range, format=form)
    days = [files.parsed(files.text(300 + 7 * day, seed=day)) for day in range(2)]
    raw = [[[own % (max_ind_range or 2**32) for own in row] for row in day[2]] for day in days]
    labels, dense, ids = files.read(tmp_path / "out")
    assert labels.tolist() == [label for day in days for label in day[0]]
    np.testing.assert_allclose(dense, [row for day in days for row in day[1]], rtol=1e-6)
    np.testing.assert_array_equal(ids, files.numbered(raw, threshold))
    assert [column.num_embeddings for column in made.columns] == (np.maximum(ids.max(0), 1) + 1).tolist()
    assert [column.distinct for column in made.columns] == [
        len({row[column] for day in raw for row in day}) for column in range(26)
    ]
    assert [(day.rows, day.clicks, day.bad_lines) for day in made.days] == [
        (len(day[0]), sum(day[0]), 0) for day in days
    ]


@pytest.mark.parametrize("tables_bytes", [1 << 10, 1 << 14, 1 << 22])
@pytest.mark.parametrize("threads", [1, 2])
def test_a_memory_too_small_for_the_tables_changes_no_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tables_bytes: int, threads: int
) -> None:
    inputs = files.write(tmp_path / "in", samples=1500)
    preprocess_criteo(inputs, tmp_path / "roomy")
    tables_of(monkeypatch, tables_bytes)
    made = preprocess_criteo(inputs, tmp_path / "tight", memory_gb=0.75, threads=threads)
    passes = [column.passes for column in made.columns]
    assert (max(passes) > 1) == (tables_bytes < 1 << 22)
    assert content(tmp_path / "tight") == content(tmp_path / "roomy")


def test_days_are_in_the_order_of_their_numbers_and_else_as_given(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    for day in (10, 2):
        (tmp_path / "in" / f"day_{day}").write_bytes(files.text(20, seed=day))
    preprocess_criteo([tmp_path / "in" / "day_10", tmp_path / "in" / "day_2"], tmp_path / "out")
    made = CriteoClicks.open(tmp_path / "out")
    assert [day.name for day in made.days] == ["day_2", "day_10"]
    for name in ("train.txt", "more.txt"):
        (tmp_path / name).write_bytes(files.text(20))
    made = CriteoClicks.open(_made([tmp_path / "train.txt", tmp_path / "more.txt"], tmp_path / "other"))
    assert [Path(day.source).name for day in made.days] == ["train.txt", "more.txt"]


def _made(inputs: list[Path], out: Path, **more: bool) -> Path:
    preprocess_criteo(inputs, out, **more)  # type: ignore[arg-type]
    return out


fields = st.one_of(st.just(""), st.integers(-5, 2**31 - 1).map(str), st.integers(0, 9).map(str))
hexes = st.one_of(st.just(""), st.integers(0, 2**32 - 1).map("{:08x}".format), st.integers(0, 255).map("{:X}".format))
lines = st.builds(
    files.line,
    st.sampled_from("01"),
    st.lists(fields, min_size=13, max_size=13),
    st.lists(hexes, min_size=26, max_size=26),
)


@given(st.lists(st.one_of(lines, st.binary(max_size=60)), min_size=1, max_size=6), st.data())
@settings(max_examples=150, deadline=None)
def test_no_bytes_crash_the_parser_and_every_line_is_good_or_told(written: list[bytes], data: st.DataObject) -> None:
    damaged = []
    for own in written:
        if own and data.draw(st.booleans()):
            at = data.draw(st.integers(0, len(own) - 1))
            own = own[:at] + data.draw(st.binary(max_size=2)) + own[at + 1 :]
        damaged.append(own)
    end = data.draw(st.sampled_from([b"\n", b"\r\n"]))
    content = end.join(damaged) + end
    made = parse(Chunk(np.frombuffer(content, np.uint8), len(content), 0), Settings())
    good, told = [], []
    for number, own in enumerate(content.split(b"\n")[:-1]):
        (told if text.complaint(own) != "malformed" else good).append((number, own))
    assert made.bad == [(number, text.complaint(own)) for number, own in told]
    assert (len(made.labels), made.bad_lines) == (len(good), len(told))
    if good:
        labels, dense, ids = files.parsed(b"\n".join(own.rstrip(b"\r") for _, own in good) + b"\n")
        assert made.labels.tolist() == labels
        np.testing.assert_allclose(made.dense, dense, rtol=1e-6)
        assert made.ids.T.tolist() == ids


BAD = {
    "expected 40 columns separated by tabs, got 39": files.line().rpartition(b"\t")[0],
    "expected 40 columns separated by tabs, got 1$": b"",
    "the label must be 0 or 1, got '2'": files.line("2"),
    "the label must be 0 or 1, got '10'": files.line("10"),
    "int_3 must be empty or an integer of 32 bits, got '1.5'": files.line(ints=["1"] * 3 + ["1.5"] + ["1"] * 9),
    "int_12 must be empty or an integer of 32 bits, got '2147483648'": files.line(ints=["1"] * 12 + ["2147483648"]),
    "int_0 must be empty or an integer of 32 bits, got '-'": files.line(ints=["-"] + ["1"] * 12),
    "cat_0 must be empty or up to 8 hex digits, got '0000000g'": files.line(cats=["0000000g"] + ["1"] * 25),
    "cat_25 must be empty or up to 8 hex digits, got '123456789'": files.line(cats=["1"] * 25 + ["123456789"]),
}


@pytest.mark.parametrize("says", BAD)
@pytest.mark.parametrize("hash_size", [0, 100])
def test_a_malformed_line_is_refused_by_file_and_number_or_counted(tmp_path: Path, says: str, hash_size: int) -> None:
    good = files.text(100).splitlines()
    (tmp_path / "day_0").write_bytes(b"\n".join([*good[:70], BAD[says], *good[70:]]) + b"\n")
    with pytest.raises(ValueError, match=rf"day_0, line 71: {says.rstrip('$')}") as refused:
        preprocess_criteo([tmp_path / "day_0"], tmp_path / "out", hash_size=hash_size)
    assert "--skip-bad" in str(refused.value)
    assert not [path.name for path in (tmp_path / "out").iterdir() if path.name not in ("manifest.json", "lock")]

    made = preprocess_criteo([tmp_path / "day_0"], tmp_path / "skipped", hash_size=hash_size, skip_bad=True)
    assert (made.days[0].rows, made.days[0].bad_lines) == (100, 1)
    assert made.days[0].bad[0].startswith("line 71: ")
    (tmp_path / "clean").write_bytes(b"\n".join(good))  # the last line's end may be missing
    preprocess_criteo([tmp_path / "clean"], tmp_path / "right", hash_size=hash_size)
    assert content(tmp_path / "skipped") == content(tmp_path / "right")


def test_files_that_are_cut_off_corrupt_empty_or_no_text_are_refused(tmp_path: Path) -> None:
    whole = gzip.compress(files.text(2000))
    damaged = bytearray(whole)
    damaged[-6] ^= 255  # of the checksum: the lines themselves are whole
    cases = {
        "cut.gz": (whole[:-40], "cut.gz is cut off: its gzip stream ends after line"),
        "corrupt.gz": (bytes(damaged), "corrupt.gz is corrupt after line 1,"),
        "plain.gz": (files.text(5), "plain.gz is named .gz but is not a gzip file"),
        "empty": (b"", "empty has no good line at all"),
        "zeros": (bytes(30_000), "zeros, line 1 or later: a line of more than 10,000 bytes"),
        "words": (b"no clicks\n", r"words, line 1: expected 40 columns separated by tabs, got 1"),
    }
    for name, (content, says) in cases.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ValueError, match=says):
            preprocess_criteo([tmp_path / name], tmp_path / f"{name}_out")
    (tmp_path / "allbad").write_bytes(b"x\ny\n")
    with pytest.raises(ValueError, match="allbad has no good line: line 1"):
        preprocess_criteo([tmp_path / "allbad"], tmp_path / "out", skip_bad=True)


def test_inputs_and_folders_that_cannot_be_are_refused(tmp_path: Path) -> None:
    day = files.write(tmp_path / "in", days=1)[0]
    with pytest.raises(FileNotFoundError, match="day_7 does not exist"):
        preprocess_criteo([tmp_path / "day_7"], tmp_path / "out")
    with pytest.raises(ValueError, match="names a file twice"):
        preprocess_criteo([day, day], tmp_path / "out")
    with pytest.raises(ValueError, match="inputs is empty"):
        preprocess_criteo([], tmp_path / "out")
    with pytest.raises(ValueError, match="holds other files"):
        preprocess_criteo([day], tmp_path / "in")
    wrong_settings = {"threshold": 0}, {"hash_size": -1}, {"hash_size": 5, "threshold": 2}, {"format": "csv"}
    for wrong in (*wrong_settings, {"memory_gb": 0.1}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            preprocess_criteo([day], tmp_path / "out", **wrong)  # type: ignore[arg-type]
    two = tmp_path / "two"
    with pytest.raises(ValueError, match="another run writes to it"):
        preprocess_criteo([day], two, on_progress=lambda _: _made([day], two, resume=True))
    out = _made([day], tmp_path / "out")
    with pytest.raises(ValueError, match="already holds a run"):
        preprocess_criteo([day], out)
    with pytest.raises(ValueError, match="was begun with threshold 3"):
        preprocess_criteo([day], out, threshold=2, resume=True)
    assert preprocess_criteo([day], out, resume=True).complete
    day.write_bytes(files.text(5))
    with pytest.raises(ValueError, match="other input files, or they have changed since"):
        preprocess_criteo([day], out, resume=True)


@pytest.mark.parametrize("form", ["npy", "parquet"])
def test_a_folder_that_is_not_what_was_written_is_refused(tmp_path: Path, form: str) -> None:
    out = tmp_path / "out"
    preprocess_criteo(files.write(tmp_path / "in"), out, format=form)
    victim = out / ("day_1_sparse.npy" if form == "npy" else "day_1.parquet")
    whole = victim.read_bytes()
    victim.write_bytes(whole[:-4])
    with pytest.raises(ValueError, match=rf"{victim.name} has [\d,]+ bytes, the manifest says"):
        CriteoClicks.open(out)
    damaged = bytearray(whole)
    damaged[len(whole) // 2] ^= 1
    victim.write_bytes(bytes(damaged))
    CriteoClicks.open(out)
    with pytest.raises(ValueError, match=rf"{victim.name} has CRC-32 .*changed or damaged"):
        CriteoClicks.open(out, check="sums")
    victim.unlink()
    with pytest.raises(ValueError, match=rf"{victim.name} is missing"):
        CriteoClicks.open(out)
    (out / "manifest.json").write_text("{}")
    with pytest.raises(ValueError, match="is not a manifest of preprocessed clicks"):
        CriteoClicks.open(out)
    with pytest.raises(FileNotFoundError, match="has no manifest"):
        CriteoClicks.open(tmp_path / "nothing")


def test_an_id_outside_its_table_is_told_by_sample_and_feature(tmp_path: Path) -> None:
    out = _made(files.write(tmp_path / "in", days=1), tmp_path / "out")
    data = CriteoClicks.open(out)
    data.features["cat_4"] = 2
    with pytest.raises(ValueError, match=r"sample 0: cat_4 is 2, its table has 2 rows"):
        data.check_numbers()


@pytest.mark.parametrize("form", ["npy", "parquet"])
@pytest.mark.parametrize("in_memory", [False, True])
def test_any_samples_of_any_days_are_read_alike(tmp_path: Path, form: str, in_memory: bool) -> None:
    preprocess_criteo(files.write(tmp_path / "in", days=3), tmp_path / "out", hash_size=1001, format=form)
    data = CriteoClicks.open(tmp_path / "out", in_memory=in_memory)
    labels, dense, ids = files.read(tmp_path / "out")
    raw = [row for day in range(3) for row in files.parsed(files.text(300 + 7 * day, seed=day))[2]]
    np.testing.assert_array_equal(ids, np.array(raw) % 1001)  # hashed
    for samples in (np.array([900, 0, 299, 300, 606, 607, 0]), np.array([5]), np.empty(0, np.int64)):
        batch = data.batch(samples)
        assert batch.labels.tolist() == labels[samples].tolist()
        assert batch.dense_features.tolist() == dense[samples].tolist()
        assert batch.sparse_features.values().view(26, -1).t().tolist() == ids[samples].tolist()
    for begin, end in ((0, 10), (290, 310), (0, len(data)), (300, 607), (607, 607), (len(data), len(data))):
        assert data.batch(range(begin, end)).labels.tolist() == labels[begin:end].tolist()
    with pytest.raises(ValueError, match=r"samples must lie in \[0, 921\)"):
        data.batch(range(920, 922))


def test_stages_are_torchrecs_and_a_config_names_them(tmp_path: Path) -> None:
    out = _made(files.write(tmp_path / "in", days=3), tmp_path / "out")
    data = CriteoClicks.open(out)
    assert [len(data.stage(stage)) for stage in ("train", "val", "test")] == [607, 157, 157]
    splits = build_dataset({"name": "criteo", "path": str(out), "test": "val"})
    assert (len(splits.train), len(splits.test)) == (607, 157)
    whole = torch.cat([batch.labels for batch in BatchLoader(splits.train, 50)])
    assert whole.tolist() == files.read(out)[0][:607].tolist()
    first = CriteoClicks.open(out, days=[0])
    with pytest.raises(ValueError, match="has one day: stages need two"):
        first.stage("train")
    with pytest.raises(ValueError, match="days must be numbers from 0 to 2"):
        CriteoClicks.open(out, days=[3])
