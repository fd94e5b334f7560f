"""The prose of notebook 00 is what its cells print."""

import recshard_lab as rs
from tests.notebooks.claims import stored

INDEX = stored("00")


def test_mlperfs_tables_need_more_than_one_gpu_and_fit_on_eight() -> None:
    assert "has 26 such tables" in INDEX.prose("A guess first")
    figure = INDEX.cell("views.placement").output
    assert "Placement: 26 tables on 8 ranks." in figure
    one, eight = INDEX.output_of("plan_of_scheme").splitlines()
    assert "DOES NOT FIT" in one
    assert "eight GPUs: fits" in eight
    assert "Eight GPUs together have room." in INDEX.prose("Eight GPUs")


def test_the_guess_and_the_exercise_are_of_these_tables() -> None:
    weights_gb = sum(table.weight_bytes for table in rs.planner.mlperf_dlrm_dcnv2_tables()) / 1e9
    assert INDEX.cell("lab.guess").number("GB") == round(weights_gb, 1)
    assert INDEX.cell("lab.check").number("GPUs") == 3
    assert 2 * weights_gb / 70 < 3 < 2 * weights_gb / 70 + 1


def test_the_doctor_starts_two_ranks_and_needs_no_gpu() -> None:
    checkup = INDEX.output_of("doctor.checkup")
    assert "2 ranks over gloo" in checkup
    assert "You need two cores and no GPU." in INDEX.prose("The lessons")
