"""The prose of notebook 06 is what its cells print, and its rules of thumb are what the cost model computes."""

import random
import re

import pytest

import recshard_lab as rs
from recshard_lab import lab
from tests.notebooks.claims import stored

SCHEMES = stored("06")


def megabytes(scheme: str, E: int, D: int, B: int, L: int, W: int, N: int) -> float:
    tables = [rs.EmbeddingBagConfig(E, D, name="t", feature_names=["t"])]
    plan = lab.plan_of_scheme(scheme, tables, W, W // N)
    found = rs.estimate(plan, tables, rs.Topology(W, local_world_size=N), rs.Workload(B, float(L)))
    return float(found.traffic_bytes.sum() - found.traffic_bytes.trace()) / 1e6


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("columns", [32, 64, 128])
def test_column_wise_beats_row_wise_exactly_below_two_ids_per_column(ranks: int, columns: int) -> None:
    """The lines of the first figure cross at 2 D, and exercise a has this answer."""
    for ids in (1, 2 * columns - 1, 2 * columns + 1, 8 * columns):
        sizes = {"E": 10**6, "D": columns, "B": 256, "L": ids, "W": ranks, "N": ranks}
        assert (megabytes("column_wise", **sizes) < megabytes("row_wise", **sizes)) == (ids < 2 * columns)
    assert "So L < 2 D, on any number of ranks." in SCHEMES.prose("W L + 2 D < L + 2 W D")
    assert "One solution: lambda D: 2 * D" in SCHEMES.output_of("lab.check(mine_a")


def rules() -> list[tuple[str, str]]:
    """Condition and scheme of each line of the table of section 6."""
    found = re.findall(r"\| ([^|]+?) \| `(\w+)` \|", SCHEMES.prose("6. Rules of thumb"))
    return [(condition.strip("`"), scheme) for condition, scheme in found]


def test_each_rule_of_thumb_has_the_fewest_bytes_of_the_schemes_that_are_left() -> None:
    assert [scheme for _, scheme in rules()] == ["data_parallel", "table_wise", "column_wise", "grid_shard", "row_wise"]
    draw, met = random.Random(0), set()
    for _ in range(60):
        nodes, local = draw.choice([1, 2, 4]), draw.choice([2, 4])
        sizes = {
            "W": nodes * local,
            "N": local,
            "D": draw.choice([64, 128]),
            "L": draw.choice([1, 8, 30, 100, 300, 900]),
        }
        sizes |= {"B": draw.choice([64, 2048]), "E": draw.choice([8, 100, 10**6])}
        fits_on_one_rank = sizes["E"] < 1_000 or draw.random() < 0.3
        left = [scheme for _, scheme in rules()]
        for condition, scheme in rules():
            holds = {"the table fits on one rank": fits_on_one_rank, "otherwise": True}.get(condition)
            if holds is None:
                holds = eval(condition, {}, sizes)
            if holds:
                break
            left.remove(scheme)
        sent = {other: megabytes(other, **sizes) for other in left}
        assert sent[scheme] <= 1.001 * min(sent.values()), (sizes, sent)
        met.add(scheme)
    assert len(met) == 5


def test_formula_cost_model_and_counts_agree_for_every_scheme() -> None:
    formulas, counts = SCHEMES.cell("formula = 4 *"), SCHEMES.cell("apart = counted")
    for name in ("table_wise", "row_wise", "column_wise", "table_row_wise", "table_column_wise", "grid_shard"):
        *_, formula, predicted = formulas.row(f"{name} ")
        assert formula == predicted
    for name in rs.sharding.scheme_names():
        predicted, counted, _ = counts.row(f"{name} ")
        assert abs(predicted - counted) <= 0.01 * predicted + 0.01, name
    lines = SCHEMES.output_of("sorted(sent").splitlines()
    verdict = SCHEMES.output_of("most, least")
    assert f"Fewest bytes: {lines[0].split()[0]}." in verdict
    assert f"Most bytes: {lines[-1].split()[0]}." in verdict
