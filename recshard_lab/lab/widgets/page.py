"""The written parts of the plan comparison, as HTML in the colours of the page around it."""

from __future__ import annotations

from html import escape
from typing import Any

from recshard_lab.embedding.configs import BaseEmbeddingConfig
from recshard_lab.lab.live_model import Proof
from recshard_lab.lab.theme import bytes_text, count_text, ms_text, number
from recshard_lab.lab.widgets.question import Answer

SIDES = {"mine": "Your plan", "auto": "The planner's plan"}
_HEADS = {**SIDES, "live": "Now on the ranks", "asked": "What you ask for"}

STYLE = """<style>
.recshard-plan-compare .rs-card{border:1px solid var(--jp-border-color1,#c4c9d0);border-radius:6px;
 padding:8px 12px;box-sizing:border-box;line-height:1.35;color:var(--jp-ui-font-color1,inherit)}
.recshard-plan-compare .rs-card h4{margin:0 0 4px;font-size:14px}
.recshard-plan-compare .rs-facts{display:flex;flex-wrap:wrap;gap:4px 24px}
.recshard-plan-compare .rs-facts span{display:block;font-size:11px;color:var(--jp-ui-font-color2,inherit)}
.recshard-plan-compare .rs-facts b{display:block;font-size:16px;font-variant-numeric:tabular-nums;white-space:nowrap}
.recshard-plan-compare .rs-facts small{font-size:11px;font-weight:400}
.recshard-plan-compare .rs-alert{border-left:4px solid #d9480f;padding:4px 10px;margin-top:6px;line-height:1.4;
 white-space:normal}
.recshard-plan-compare pre{margin:4px 0 0;padding:8px 10px;white-space:pre;overflow:auto;box-sizing:border-box;
 max-height:420px;line-height:1.35;
 color:var(--jp-content-font-color1,inherit);background:var(--jp-cell-editor-background,transparent);
 border:1px solid var(--jp-border-color2,#d8dce1)}
.recshard-plan-compare .widget-html-content{white-space:normal;line-height:1.4;min-width:0}
.recshard-plan-compare svg[role=img]{width:100%;max-width:620px}
</style>"""


def facts(table: BaseEmbeddingConfig) -> str:
    """A table in a few words."""
    size = f"{count_text(table.num_embeddings)} rows x {table.embedding_dim} cols"
    return f"{size}, {bytes_text(table.weight_bytes)}"


def card(side: str, shown: Answer, measured: Any) -> str:
    """The numbers of one plan; ``data-`` attributes carry them unrounded."""
    if shown.estimate is None:
        return f'<div class="rs-card" data-side="{side}"><h4>{_HEADS[side]}</h4>{alert(shown.problem)}</div>'
    estimate = shown.estimate
    held = estimate.memory_bytes.sum(axis=1)
    if "reserve" in estimate.memory_categories:
        held = held - estimate.memory_bytes[:, estimate.memory_categories.index("reserve")]
    fullest, cap = float(held.max()), float(estimate.capacity_bytes[0])
    sent = float(estimate.traffic_bytes.sum() - estimate.traffic_bytes.trace())
    step, most = ms_text(estimate.step_ms), bytes_text(fullest)
    if measured is not None:
        step += f" <small>predicted, {ms_text(measured.step_ms)} measured</small>"
        most += f" <small>predicted, {bytes_text(float(measured.memory_bytes.sum(axis=1).max()))} measured</small>"
    entries = [
        ("Step", step),
        ("Fullest rank", most),
        ("Sent in a step", bytes_text(sent)),
        (f"Memory {bytes_text(cap)} a rank", "✓ fits" if estimate.fits else "✗ does not fit"),
    ]
    listed = "".join(f"<div><span>{label} </span><b>{value}</b></div>" for label, value in entries)
    problem = ""
    if shown.problem:
        problem = alert(shown.problem) + note("Shown is what would be planned without a memory limit.")
    return (
        f'<div class="rs-card" data-side="{side}" data-step-ms="{estimate.step_ms!r}" '
        f'data-fits="{str(estimate.fits).lower()}" data-memory-bytes="{fullest!r}"'
        + (f' data-measured-ms="{measured.step_ms!r}"' if measured is not None else "")
        + f'><h4>{_HEADS[side]}</h4><div class="rs-facts">{listed}</div>{problem}</div>'
    )


def sentence(shown: Answer) -> str:
    """One plan in a line of text."""
    if shown.estimate is None:
        return shown.problem
    fits = "fits" if shown.estimate.fits else "does not fit"
    return f"{ms_text(shown.estimate.step_ms)} a step, {fits}"


def verdict(mine: Answer, auto: Answer) -> str:
    """Which of the two is faster, in a sentence."""
    words = ""
    if mine.estimate is not None and auto.estimate is not None:
        ratio = mine.estimate.step_ms / auto.estimate.step_ms if auto.estimate.step_ms else 1.0
        if mine.problem or auto.problem:
            none = "Neither plan fits." if mine.problem and auto.problem else ""
            words = none or ("Your plan does not fit." if mine.problem else "Your plan fits, the planner found none.")
        elif not mine.question.chosen:
            words = "Every table is on auto: your plan is the planner's. Choose a scheme for a table to compare."
        elif abs(ratio - 1) < 0.005:
            words = "Both plans take the same time."
        elif ratio > 1:
            words = f"Your plan is predicted to take <b>{number(ratio)} times as long</b> as the planner's."
        else:
            words = f"Your plan is predicted to be <b>{number(1 / ratio)} times as fast</b> as the planner's."
    return f'<div role="status" aria-live="polite">{words}</div>'


def badge(proof: Proof | None) -> str:
    """What the last live resharding cost, and whether anything changed."""
    if proof is None:
        return note("Choose a scheme or drag a line, then Apply: the ranks move their tables in place.")
    apart = proof.outputs_apart
    words = "outputs equal bit for bit" if apart == 0 else f"outputs apart by {number(apart, 2)} of the largest"
    weights = "weights equal bit for bit" if proof.weights_equal else "WEIGHTS DIFFER"
    sign = "✓ the same model" if proof.same else "✗ not the same model"
    cost = f"{bytes_text(proof.bytes_moved)} moved in {ms_text(proof.ms)}"
    style = "border:1px solid currentColor;border-radius:5px;padding:3px 9px;display:inline-block"
    return (
        f'<div role="status" class="rs-badge" data-same="{str(proof.same).lower()}" data-apart="{apart!r}" '
        f'style="{style}"><b>{sign}</b>: {weights}, {words}. {cost}.</div>'
    )


def picture(markup: str) -> str:
    return f'<div style="color:var(--jp-ui-font-color1,inherit)">{markup}</div>'


def code(python: str) -> str:
    """The Python equivalent."""
    return f"<details open><summary>Your plan in Python</summary><pre>{escape(python)}</pre></details>"


def alert(words: str) -> str:
    return f'<div class="rs-alert" role="alert">{escape(words)}</div>'


def note(words: str) -> str:
    return f'<div role="status">{escape(words)}</div>'
