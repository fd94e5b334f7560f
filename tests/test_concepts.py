"""Concept pages: pictures are what their code draws, and stated errors are the recorded ones."""

import math
import re
import runpy
from pathlib import Path

import recshard_lab as rs
from benchmarks import published
from benchmarks.gate.docs import executor_rows
from benchmarks.gate.record import Record

ROOT = Path(__file__).parents[1]
PAGES = sorted((ROOT / "docs/concepts").glob("*.md"))


def test_pictures_are_what_their_code_draws() -> None:
    pictures = runpy.run_path(str(ROOT / "docs/pictures.py"))["PICTURES"]
    assert {path.stem for path in (ROOT / "docs/images").glob("*.svg")} == set(pictures)
    for name, draw in pictures.items():
        assert (ROOT / f"docs/images/{name}.svg").read_text() == draw() + "\n", "python docs/pictures.py"


def test_the_stated_errors_on_gpus_are_those_of_the_recorded_predictions() -> None:
    page = (ROOT / "docs/concepts/cost_model.md").read_text()
    rows = [row.strip("| ").split(" | ") for row in list(executor_rows(Record(ROOT / ".ci/figures.json")))[2:]]
    errors = {name: int(error.rstrip("%")) for name, _, error, _ in rows}
    ((steps, mean, *ends_stated),) = re.findall(
        r"\| step on GPUs \| (\d+) published steps.*\| (\d+)%, by executor (\d+)% to (\d+)% \|", page
    )
    assert [int(number) for number in ends_stated] == [min(errors.values()), max(errors.values())]
    ratios = [published.content()["recorded"][entry["name"]] for entry in published.content()["points"]]
    logs = [abs(math.log(ratio)) for ratio in ratios]
    assert int(steps) == len(ratios)
    assert int(mean) == errors["all"] == round(100 * (math.exp(sum(logs) / len(logs)) - 1))
    ends = [float(end) for name, _, _, ratios in rows if name in ("HugeCTR", "SOK") for end in ratios.split(" to ")]
    assert "(HugeCTR, SOK), the prediction is within 30% of every step" in page
    assert max(max(end, 1 / end) for end in ends) <= 1.3


def test_flex_shard_sends_what_the_pages_say() -> None:
    table = rs.EmbeddingBagConfig(8_000, 32, name="movies", feature_names=["movie"])
    topology, load = rs.Topology(4), rs.Workload(batch_size=512, pooling_factors=10.0)
    sent = {}
    for scheme in ("row_wise", "flex_shard"):
        plan = rs.ShardingPlan({"": {"movies": rs.sharding.scheme_named(scheme).default(table, topology)}})
        sent[scheme] = rs.estimate(plan, [table], topology, load).traffic_by_phase
    forward, backward = "output_dist/rows", "output_dist_backward/rows"
    assert sent["flex_shard"][forward].sum() == sent["row_wise"][forward].sum() > 0  # partial sums of cold rows
    assert sent["flex_shard"][backward].sum() > sent["row_wise"][backward].sum()  # also gradients of hot rows
    tiling = (ROOT / "docs/concepts/tiling.md").read_text()
    assert "by row | as `row_wise`, and the gradients of hot rows |" in tiling
    assert (
        "`flex_shard` sends the same for cold rows, and also the\ngradients of hot rows"
        in (ROOT / "docs/howto/plan.md").read_text()
    )


def test_table_row_wise_with_two_hops_sends_no_more_between_nodes_than_table_wise() -> None:
    table = rs.EmbeddingBagConfig(8_000, 32, name="movies", feature_names=["movie"])
    topology, load = rs.Topology(8, local_world_size=4), rs.Workload(batch_size=512, pooling_factors=10.0)
    node = [rank // 4 for rank in range(8)]
    across: dict[str, float] = {}
    for scheme, route in (("table_wise", "direct"), ("table_row_wise", "direct"), ("table_row_wise", "two_hop")):
        shards = rs.sharding.scheme_named(scheme).default(table, topology).shards
        plan = rs.ShardingPlan({"": {"movies": rs.ParameterSharding(scheme, shards=shards, route=route)}})
        phases = rs.estimate(plan, [table], topology, load).traffic_by_phase
        rows = sum(sent for label, sent in phases.items() if label.startswith("output_dist/rows"))
        across[f"{scheme}, {route}"] = sum(rows[i, j] for i in range(8) for j in range(8) if node[i] != node[j])
    assert across["table_row_wise, direct"] == 4 * across["table_wise, direct"]
    assert across["table_row_wise, two_hop"] == across["table_wise, direct"]
    tiling = (ROOT / "docs/concepts/tiling.md").read_text()
    assert 'one node | N times the rows. With `route="two_hop"`, no more between nodes |' in tiling
