"""A run that is killed at any moment, or whose disk fills, is gone on with to the very files of one that was not."""

import errno
import hashlib
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from recshard_lab.data import CriteoClicks, preprocess_criteo
from recshard_lab.data.criteo import text
from tests.data import criteo_files as files

# Kills itself before the n-th write, flush, rename or removal; forks once for each n, before there are threads.
KILLED = """
import os, pathlib, signal, sys
from recshard_lab.data import preprocess_criteo
from recshard_lab.data.criteo import folder, text, preprocess
text.CHUNK_BYTES = 10_000
form, tables, inputs, out, points = sys.argv[1], int(sys.argv[2]), sys.argv[3].split(), sys.argv[4], int(sys.argv[5])
preprocess._BESIDES_TABLES = int(0.75e9) - tables
count, at = 0, 0

def counted(function):
    def called(*args, **kwargs):
        global count
        count += 1
        if count == at:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*args, **kwargs)
    return called

folder.FileWriter._put = counted(folder.FileWriter._put)
folder.FileWriter.finish = counted(folder.FileWriter.finish)
folder.Manifest.save = counted(folder.Manifest.save)
os.fsync = counted(lambda file: None)  # a killed process loses nothing that it has written
os.posix_fallocate = counted(os.posix_fallocate)
pathlib.Path.replace = counted(pathlib.Path.replace)
pathlib.Path.unlink = counted(pathlib.Path.unlink)

def run(place, stop, resume):
    global count, at
    child = os.fork()
    if child == 0:
        count, at = 0, stop
        preprocess_criteo(inputs, place, resume=resume, format=form, memory_gb=0.75)
        pathlib.Path(out, "count").write_text(str(count))
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

if form == "parquet":
    import pyarrow.parquet
preprocess_criteo(inputs, f"{out}/warm", memory_gb=0.75)  # compiled once, not in every child
assert run(f"{out}/whole", 0, False) == 0
total = int(pathlib.Path(out, "count").read_text())
for point in range(points):
    place, stop = f"{out}/killed{point}", 1 + point * total // points
    status = run(place, stop, False)
    assert status == -signal.SIGKILL, (status, stop)
    assert run(place, stop + 3, True) in (0, -signal.SIGKILL)  # and again, a little later in its course
    assert run(place, 0, True) == 0, stop
"""


def content(folder: Path) -> dict[str, str]:
    told = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}
    return {name: digest for name, digest in told.items() if name != "lock"}


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("form", "tables", "points"), [("npy", 1 << 22, 18), ("npy", 1 << 10, 4), ("parquet", 1 << 22, 4)]
)
def test_a_run_killed_any_time_ends_with_the_same_files(tmp_path: Path, form: str, tables: int, points: int) -> None:
    inputs = files.write(tmp_path / "in", samples=200)
    (tmp_path / "out").mkdir()
    arguments = [form, str(tables), " ".join(map(str, inputs)), str(tmp_path / "out"), str(points)]
    done = subprocess.run([sys.executable, "-c", KILLED, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    whole = content(tmp_path / "out" / "whole")
    assert len(whole) == 53 + (6 if form == "npy" else 2)  # numbers and counts of 26 categories, the days, the manifest
    for point in range(points):
        assert content(tmp_path / "out" / f"killed{point}") == whole, point


@pytest.mark.parametrize(("limit", "cut_off"), [(5_000, "labels|dense|ids"), (40_000, "sparse|ids|dense")])
def test_a_full_disk_is_named_nothing_is_lost_and_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: int, cut_off: str
) -> None:
    monkeypatch.setattr(text, "CHUNK_BYTES", 10_000)
    inputs = [*files.write(tmp_path / "in", days=1, samples=60)]
    (tmp_path / "in" / "day_1").write_bytes(files.text(1500, seed=9))
    inputs.append(tmp_path / "in" / "day_1")
    preprocess_criteo(inputs[:1], tmp_path / "compiled")  # numba stores its machine code, which the limit would refuse
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))  # the kernel refuses more, as a full disk does
    try:
        with pytest.raises(OSError, match=rf"day_[01]_.*({cut_off}).*make room and run it again with --resume") as full:
            preprocess_criteo(inputs, tmp_path / "out")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert full.value.errno == errno.EFBIG
    assert not list((tmp_path / "out").glob("*.part"))
    with pytest.raises(ValueError, match="is not finished: run `recshard data criteo` on it again with --resume"):
        CriteoClicks.open(tmp_path / "out")
    preprocess_criteo(inputs, tmp_path / "out", resume=True)
    preprocess_criteo(inputs, tmp_path / "right")
    assert content(tmp_path / "out") == content(tmp_path / "right")


def test_a_file_lost_since_is_told_on_resuming(tmp_path: Path) -> None:
    inputs = files.write(tmp_path / "in")
    preprocess_criteo(inputs, tmp_path / "out")
    os.truncate(tmp_path / "out" / "cat_3_ids.npy", 130)
    with pytest.raises(ValueError, match=r"cat_3_ids\.npy has 130 bytes, the manifest says"):
        preprocess_criteo(inputs, tmp_path / "out", resume=True)
