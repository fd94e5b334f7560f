"""The page of ``recshard demo``: the comparison as a table, the loss curves, the pictures of each plan."""

from __future__ import annotations

from recshard_lab.cores import machine
from recshard_lab.lab import views
from recshard_lab.lab.demo.experiment import moved_bytes
from recshard_lab.lab.demo.training import SPLITS, Comparison
from recshard_lab.lab.draw.theme import SCHEMES, bytes_text, look_of, with_notes
from recshard_lab.lab.exporting.assumptions import assumptions
from recshard_lab.lab.exporting.exportable import Candidate, Exportable
from recshard_lab.lab.exporting.report import Section
from recshard_lab.sharding import Topology
from recshard_lab.text_table import TextTable

PREDICTED = (
    "Predicted step times come from a cost model that is not calibrated on this machine. Measured ones are medians. "
    "They include waiting for a core where ranks share cores."
)


def rows_of(found: Comparison) -> list[list[str]]:
    """The cells of the summary as text."""
    rows = []
    for run in found.runs:
        outcome = run.first
        cells = [run.name, " | ".join(f"{auc:.4f}" for auc in run.aucs), f"{outcome.step_ms:.1f} |     ", "", ""]
        if run.predicted is not None and outcome.measured is not None:
            held = float(outcome.measured.memory_bytes.sum(axis=1).max())
            cells[2:] = [
                f"{outcome.step_ms:.1f} | {run.predicted.step_ms:4.1f}",
                _pair(held, run.predicted.fullest_bytes),
                _pair(*(moved_bytes(sent.traffic_bytes) for sent in (outcome.measured, run.predicted))),
            ]
        rows.append(cells)
    return rows


def _pair(measured: float, predicted: float) -> str:
    """Two amounts of bytes. An equal unit is written once.

    >>> _pair(355_000, 356_000), _pair(999_000, 1_200_000)
    ('355 | 356 KB', '999 KB | 1.2 MB')
    """
    left, right = bytes_text(measured), bytes_text(predicted)
    (value, _, unit), other = left.partition(" "), right.partition(" ")[2]
    return f"{value} | {right}" if unit == other else f"{left} | {right}"


def demo_page(found: Comparison) -> Exportable:
    """The comparison as a page: the table, the loss curves, the pictures of each plan."""
    note = found.ratings.source
    heads = ("plan", *(f"AUC, {SPLITS[split]}" for split in found.splits), "step, ms", "memory", "moved per step")
    rows = [[name, *auc.split(" | "), step.rstrip("| "), *rest] for name, auc, step, *rest in rows_of(found)]
    legend = (
        "AUC: on test ratings. Other columns: measured | predicted. Memory: fullest rank. "
        "Moved: embeddings between ranks."
    )
    losses = {split: {run.name: run.outcomes[split].losses for run in found.runs} for split in found.splits}
    verdicts = ". ".join(words[0].upper() + words[1:] for _, words in found.verdicts()) + "."
    sections = [
        Section(f"The same model, {len(found.runs)} ways", [TextTable(heads, rows), legend, *found.notes(), verdicts]),
        Section(
            "Loss curves",
            [views.curves(losses[split], note=f"{note}, {SPLITS[split]}") for split in found.splits],
        ),
    ]
    tables = found.recipe.tables(found.ratings)
    candidates, columns = [], {}
    for run in found.runs:
        if run.plan is None or run.predicted is None:
            continue
        measured = run.first.measured
        topology = Topology(found.world_size)
        known = {"plan": run.plan, "tables": tables, "topology": topology, "note": note}
        known |= {"estimate": run.predicted, "measured": measured}
        pictures = [views.draw(name, **known) for name in views.views_of(*known)]
        label = look_of(run.name, SCHEMES).label.capitalize()
        sections.append(Section(label, pictures))
        columns[label] = pictures
        candidates.append(Candidate(label, run.plan, tables, topology, found.workload, run.predicted, measured))
    sections.append(assumptions(Topology(found.world_size), found.workload))
    return Exportable(
        f"One DLRM under {len(found.runs) - 1} sharding plans, {found.shape}",
        sections,
        subtitle=f"{note}. {machine()}.",
        note=with_notes(f"Ratings: {found.ratings.source}. {PREDICTED}", [found.times_note]),
        pictures=columns,
        candidates=candidates,
        name="demo",
    )
