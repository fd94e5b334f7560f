"""The prose of notebook 18 is what its cells print."""

from tests.notebooks.claims import stored

SERVING = stored("18")


def test_int8_rows_of_16_columns_have_20_of_64_bytes() -> None:
    assert "Rows have 16 columns." in SERVING.prose("## 1. Smaller rows")
    assert SERVING.cell("lab.guess(guess_share").number(after="It is") == 100 * (16 + 4) / (4 * 16)


def test_no_format_loses_much_auc() -> None:
    assert "These tables are small, and dense layers do much of the work." in SERVING.prose("`lab.compare_formats`")
    cell = SERVING.cell("lab.guess(guess_kept")
    assert cell.number(after="It is") > 99
    assert "Formats that lose an AUC of 0.001 or more: none" in cell.output


def test_a_bundle_answers_without_this_library() -> None:
    assert "A bundle answers without this library." in SERVING.prose("rs.serving.load_bundle")
    cell = SERVING.cell("lab.guess(guess_imports")
    assert cell.number(after="It is") == 2
    assert "['fbgemm_gpu', 'torch']" in cell.output
    answer = SERVING.cell("server.client().predict(")
    assert answer.number(after="answer") == answer.number(after="the model in this notebook")


def test_connections_share_calls_and_wait_longer() -> None:
    assert "more connections share calls" in SERVING.prose("Judge a server by its late answers")
    assert SERVING.cell("metrics()\nsamples, calls").number("samples a call") > 1
    one, _, sixteen = (line for line in SERVING.output_of("loads = ").splitlines() if "LoadTest(" in line)
    assert float(one.split("p99 ")[1].split()[0]) < float(sixteen.split("p99 ")[1].split()[0])


def test_no_request_fails_during_the_change() -> None:
    assert SERVING.cell("lab.guess(guess_failed").number("requests") == 0


def test_a_split_model_differs_by_rounding() -> None:
    assert "Within rounding of fp32 sums (1e-5): True" in SERVING.output_of("lab.guess(guess_difference")


def test_answers_of_the_teachers_page() -> None:
    assert SERVING.cell("mine_a").number("GB") == 3.6
    assert SERVING.cell("lab.check(mine_c").number("calls") == 63
