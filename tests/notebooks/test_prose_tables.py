"""Notebooks 01 to 04 say what their cells print."""

import math
import re

from tests.notebooks.claims import stored
from tests.notebooks.runs import FOLDER

PAGE = (FOLDER / "TEACHING.md").read_text()


def test_01_curves_of_all_schemes_coincide_and_quality_is_the_same() -> None:
    first = stored("01")
    for cell in (first.cell('"sharded": sharded.losses'), first.cell("s: run.losses")):
        assert cell.number(after="any two curves: ") < 0.002
    table = first.cell("'sent per step'")
    qualities = [table.row(name)[0] for name in ("unsharded", "table_wise", "row_wise", "data_parallel")]
    assert max(qualities) - min(qualities) < 0.001
    assert "the same for all schemes, up to rounding" in first.prose("**AUC**")


def test_01_the_scheme_that_sends_most_is_computed_from_the_table() -> None:
    first = stored("01")
    table = first.cell("'sent per step'")
    sent = {name: table.row(name)[1] for name in ("table_wise", "row_wise", "data_parallel")}
    most, least = max(sent, key=sent.__getitem__), min(sent, key=sent.__getitem__)
    assert table.line("times the bytes").startswith(most)
    assert table.line("times the bytes").endswith(f"{least}.")
    assert first.output_of("lab.guess(mine, max(sent").startswith(f"No guess yet. It is {most}.")
    assert "Under `row_wise` every rank" in PAGE
    assert most == "row_wise"


def test_01_its_batch_is_jagged_and_the_teachers_page_has_its_ids() -> None:
    guess = stored("01").cell('batch.values().numel(), "ids"')
    ids = int(guess.number("ids"))
    assert ids > 24
    assert f"It is {ids}: some movies" in PAGE


def test_01_memory_and_ranks() -> None:
    first = stored("01")
    assert first.output_of("lab.guess(mine, largest)").endswith("output_buffers.\n")
    assert "the output buffers win" in PAGE
    held = [first.cell("ranks.pull").row(f"rank {rank} stores") for rank in range(4)]
    whole = held[0][1]
    assert all(own < whole for own, *_ in held)
    assert "largest of the" in PAGE
    assert first.cell("drawn.losses").number(after="steps: ") < 0.002


def test_02_guesses_and_what_the_teachers_page_says_of_them() -> None:
    second = stored("02")
    assert second.cell('batch.stride(), "samples"').number("samples") == 4
    padding = second.cell("(1 - used / padded)")
    assert padding.number("%") == 98
    assert "It is 98%" in PAGE
    mean = padding.number(after="mean ")
    assert 9 < mean < 12
    assert "a mean of about 10 ids" in second.prose("2,048 users")
    assert second.cell('"yes" if copied').line("It is") == "No guess yet. It is yes."
    assert second.cell('pooled["film"][2, 0]').number(after="It is ") == 0


def test_02_weights_count_and_are_learned() -> None:
    second = stored("02")
    weighted = second.cell("reads_weights(weighted)")
    assert weighted.row("weighted:")[:2] != weighted.row("unweighted:")[:2]
    assert weighted.number(after="by hand: ") < 1e-6
    lines = second.cell("history[-1]")
    assert lines.line("largest weight").find("Place 1 has the largest weight") >= 0
    assert lines.row("place 1")[-1] > 0.9
    assert max(lines.row("place 2")[-1], lines.row("place 3")[-1]) < 0.1


def test_03_two_prices_are_in_the_measurement() -> None:
    """Calls per step: operators grow with tables, hardly with the batch. Rows per id: bytes of the sparse gradient."""
    third = stored("03")
    counts = third.cell("for way, short in names.items()")
    for way in ("separate", "fused"):
        few, _, many, _ = counts.row(way)
        assert few <= many < 1.25 * few
    small, _, large, _ = counts.row("gradient bytes")
    assert large == 64 * small
    separate, fused = third.cell("separate / fused").row("operators and")[:2]
    assert separate > 20 * fused
    phases = third.cell("found = lab.compare_lookups(tables, batch)")
    assert phases.row("one fused collection")[2] == 0  # no optimizer phase
    assert "has no optimizer phase" in third.prose("second price")


def test_03_the_ratio_and_the_phase_that_grows() -> None:
    third = stored("03")
    ratios = third.cell("ratios = [sized[n].ratio")
    values = ratios.row("ratio:")[::2]
    falls = values == sorted(values, reverse=True)
    assert f"It is {'yes' if falls else 'no'}." in ratios.output
    assert "need not fall" in third.prose("second price")
    assert re.search(r"grows most: \d+ times", third.output_of("grown = {"))


def test_03_bytes_of_gradients_and_states() -> None:
    third = stored("03")
    dense = third.cell("lab.guess(mine, size[False]")
    assert dense.number("bytes") == 20_000 * 32 * 4
    assert dense.number(after="sparse ") == 128 * 32 * 4
    states = third.cell("GB of state")
    assert states.row("exact_adagrad")[0] == states.number(after="weights ")
    assert states.row("exact_row_wise_adagrad")[0] == 0.16
    assert "6.8 MB" in PAGE
    assert "104.6 GB" in PAGE


def test_04_sharded_and_plain_rank_alike_and_better_than_popular_films() -> None:
    fourth = stored("04")
    quality = fourth.cell("NDCG@10 sharded")
    assert quality.number(after="apart ") <= 0.002
    assert fourth.cell('"row_wise": losses').number(after="any two curves: ") < 0.002
    popular = fourth.cell("popularity = ")
    assert popular.number(after="model ") > popular.number(after="popular films ")


def test_04_guesses_and_what_the_teachers_page_says_of_them() -> None:
    fourth = stored("04")
    assert fourth.cell('"next films"').number("next films") == 50
    assert fourth.cell('"places"').number("places") == 0
    assert fourth.cell("place = 3").number(after="It is ") == 0.5
    assert "at place 2 gives 0.63" in fourth.prose("NDCG@10 rewards")
    assert round(1 / math.log2(3), 2) == 0.63
    assert "It is 50, one per place" in PAGE
