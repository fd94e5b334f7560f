"""Notebooks 01 to 04 say what their cells print."""

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
        assert few <= many <= few + 4
    small, _, large, _ = counts.row("gradient bytes")
    assert large == 64 * small
    separate, fused = third.cell("separate / fused").row("operators and")[:2]
    assert separate > 20 * fused
    phases = third.cell("found = lab.compare_lookups(tables, batch)")
    assert phases.row("one fused collection")[2] == 0  # no optimizer phase
    assert "has no optimizer phase" in third.prose("second price")


def test_04_sharded_and_plain_rank_alike_and_better_than_popular_films() -> None:
    fourth = stored("04")
    quality = fourth.cell("NDCG@10 sharded")
    assert quality.number(after="apart ") <= 0.002
    assert fourth.cell('"row_wise": losses').number(after="any two curves: ") < 0.002
    popular = fourth.cell("popularity = ")
    assert popular.number(after="model ") > popular.number(after="popular films ")
