"""The written parts of the plan comparison, as HTML in the colours of the page around it."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from html import escape
from typing import Any

from recshard_lab.embedding.configs import BaseEmbeddingConfig
from recshard_lab.lab.compare.measure import why_apart
from recshard_lab.lab.compare.plan_comparison import ROWS
from recshard_lab.lab.compare.question import Answer
from recshard_lab.lab.compare.scaling import Choice
from recshard_lab.lab.draw.theme import SCHEMES, bytes_text, count_text, look_of, ms_text, number, with_notes
from recshard_lab.lab.live.live_model import Proof
from recshard_lab.launcher.errors import ranks_text
from recshard_lab.planner import PlanDiff
from recshard_lab.planner.answers.answers import LEAST_MS, TableChange
from recshard_lab.planner.answers.text import sharding_text

MOST_NAMED = 3  # tables in a card's sentence
HEADS = {"live": "Now on the ranks", "asked": "What you ask for"}
_CALLED = {"Your plan": "your plan", "The planner's plan": "the planner's plan"}
BEST = '<i class="rs-best">★ best</i>'

STYLE = """<style>
.recshard-plan-compare .rs-card{border:1px solid var(--jp-border-color1,#c4c9d0);border-radius:6px;
 padding:8px 12px;box-sizing:border-box;line-height:1.35;color:var(--jp-ui-font-color1,inherit)}
.recshard-plan-compare .rs-card h4{margin:0 0 4px;font-size:14px}
.recshard-plan-compare .rs-facts{display:flex;flex-wrap:wrap;gap:4px 18px}
.recshard-plan-compare .rs-fits{margin-top:4px;font-size:13px;font-weight:600}
.recshard-plan-compare .rs-why{margin-top:4px;font-size:12px}
.recshard-plan-compare .rs-cards .widget-html-content,.recshard-plan-compare .rs-cards .rs-card{height:100%}
.recshard-plan-compare .rs-facts span{display:block;font-size:11px;color:var(--jp-ui-font-color2,inherit)}
.recshard-plan-compare .rs-facts b{display:block;font-size:16px;font-variant-numeric:tabular-nums;white-space:nowrap}
.recshard-plan-compare .rs-facts small{font-size:11px;font-weight:400}
.recshard-plan-compare .rs-facts .rs-ran{display:block}
.recshard-plan-compare .rs-card h4,.recshard-plan-compare .rs-facts span{overflow-wrap:anywhere}
.recshard-plan-compare .rs-best{font-size:11px;font-weight:600;font-style:normal;border:1px solid currentColor;
 border-radius:4px;padding:0 4px;margin-left:4px;white-space:nowrap;vertical-align:1px}
.recshard-plan-compare .rs-compact h4{min-height:2.6em}
.recshard-plan-compare .rs-stale .rs-facts{opacity:.45}
.recshard-plan-compare .rs-over{margin:2px 0 0 12px;font-size:14px;overflow-wrap:anywhere}
.recshard-plan-compare .rs-compact .rs-facts{flex-direction:column}
.recshard-plan-compare .rs-compact .rs-facts b{font-size:14px;white-space:normal}
.recshard-plan-compare .rs-scroll{overflow:auto;max-height:330px;border:1px solid var(--jp-border-color2,#d8dce1)}
.recshard-plan-compare .rs-scroll table{border-collapse:collapse;width:100%;font-size:12px;
 color:var(--jp-ui-font-color1,inherit)}
.recshard-plan-compare .rs-scroll th,.recshard-plan-compare .rs-scroll td{text-align:left;padding:3px 10px;
 border-bottom:1px solid var(--jp-border-color2,#d8dce1);font-variant-numeric:tabular-nums;vertical-align:top}
.recshard-plan-compare .rs-scroll tbody th{white-space:nowrap}
.recshard-plan-compare .rs-alert{border-left:4px solid #d9480f;padding:4px 10px;margin-top:6px;line-height:1.4;
 white-space:pre-wrap;overflow-wrap:anywhere}
.recshard-plan-compare .rs-gone{opacity:.45}
.recshard-plan-compare pre{margin:4px 0 0;padding:8px 10px;white-space:pre;overflow:auto;box-sizing:border-box;
 max-height:420px;line-height:1.35;
 color:var(--jp-content-font-color1,inherit);background:var(--jp-cell-editor-background,transparent);
 border:1px solid var(--jp-border-color2,#d8dce1)}
.recshard-plan-compare .widget-html-content{white-space:normal;line-height:1.4;min-width:0}
.recshard-plan-compare svg[role=img]{max-width:100%;height:auto;margin-left:-12px}
</style>"""


def facts(table: BaseEmbeddingConfig) -> str:
    """A table in a few words."""
    size = f"{count_text(table.num_embeddings)} rows x {table.embedding_dim} cols"
    return f"{size}, {bytes_text(table.weight_bytes)}"


def card(
    side: str,
    shown: Answer,
    measured: Any,
    head: str = "",
    best: Collection[str] = (),
    compact: bool = False,
    *,
    planned: bool = False,
    stale: bool = False,
    more: str = "",
) -> str:
    """The numbers of one plan; ``data-`` attributes carry them unrounded.

    Args:
        head: over it; the usual one of this side when left out.
        best: the rows in which this plan is the best of those shown.
        compact: a line a number, where there is little room.
        planned: says which ranks the planner chose, where it chose some of them.
        stale: greys the numbers, because the ranks that they are of have ended.
        more: what a measured step does beside what is predicted, a sentence.
    """
    head = escape(head or HEADS[side])
    side = escape(side, quote=True)
    if shown.estimate is None:
        return f'<div class="rs-card" data-side="{side}"><h4>{head}</h4>{alert(shown.problem)}</div>'
    estimate = shown.estimate
    values = {row.name: row.value(shown) for row in ROWS}
    ran = {}
    if measured is not None:
        ran["step_ms"] = ms_text(measured.step_ms)
        ran["memory_bytes"] = bytes_text(float(measured.memory_bytes.sum(axis=1).max()))
    entries = []
    for row in ROWS:
        more = f" <small class='rs-ran'>predicted, {ran[row.name]} measured</small>" if row.name in ran else ""
        star = f" {BEST}" if row.name in best else ""
        label, more = (row.label, more + star) if compact else (row.label + star, more)  # five numbers on one line
        value = row.text(values[row.name]).replace(" the mean", " <small>the mean</small>")
        entries.append((label, row.hint, value + more))
    cap = bytes_text(float(estimate.capacity_bytes[0]))
    room = f"✓ fits, memory {cap} a rank" if estimate.fits else f"✗ does not fit, memory {cap} a rank"
    listed = "".join(f'<div title="{hint}"><span>{label} </span><b>{value}</b></div>' for label, hint, value in entries)
    problem = ""
    if shown.problem:
        problem = alert(shown.problem)
        if shown.question.plan is None:
            problem += note("Shown is what would be planned without a memory limit.")
    words = [why_apart(estimate.step_ms, measured, shown.topology, more) if measured is not None else ""]
    words.append(with_notes("", [getattr(measured, "times_note", "")]))
    words.append(_chosen_ranks(shown) if planned else "")
    why = "".join(f'<div class="rs-why">{escape(line)}</div>' for line in words if line)
    data = "".join(f' data-{name.replace("_", "-")}="{value!r}"' for name, value in values.items())
    data += f' data-best="{" ".join(sorted(best))}"' + (
        f' data-measured-ms="{measured.step_ms!r}"' if measured is not None else ""
    )
    return (
        f'<div class="rs-card{" rs-compact" * compact}{" rs-gone" * stale}" data-side="{side}" '
        f'data-fits="{str(estimate.fits).lower()}"{data}>'
        f'<h4>{head}</h4><div class="rs-facts">{listed}</div><div class="rs-fits">{room}</div>{why}{problem}</div>'
    )


def _chosen_ranks(shown: Answer) -> str:
    """Which ranks the planner chose for tables that are row-wise on some of the ranks only; empty without any."""
    if shown.plan is None or shown.question.plan is not None:
        return ""
    size = shown.topology.world_size
    found = []
    for name, sharding in shown.plan.tables().items():
        ranks = sorted({shard.rank for shard in sharding.shards})
        if sharding.sharding_type == "row_wise" and len(ranks) < size:
            found.append(f"{name} on {ranks_text(ranks)}")
    if not found:
        return ""
    rest = f" and {len(found) - MOST_NAMED} more tables" if len(found) > MOST_NAMED else ""
    return f"The planner chose ranks for row-wise tables: {', '.join(found[:MOST_NAMED])} of {size}{rest}."


def waiting(side: str, head: str, card: str) -> str:
    """A card whose numbers are being computed: those it had, dimmed and without their data."""
    side, head = escape(side, quote=True), escape(head)
    old = re.search(r'<div class="rs-facts.*', card, re.DOTALL)
    facts = old[0] if old else "</div>"
    compact = " rs-compact" if "rs-compact" in card else ""
    kind = f"rs-card{compact} rs-stale"
    return f'<div class="{kind}" data-side="{side}" aria-busy="true"><h4>{head}: computing …</h4>{facts}'


def sentence(shown: Answer) -> str:
    """One plan in a line of text."""
    if shown.estimate is None:
        return shown.problem
    fits = "fits" if shown.estimate.fits else "does not fit"
    return f"{ms_text(shown.estimate.step_ms)} a step, {fits}"


def verdict(names: Mapping[str, str], answers: Mapping[str, Answer]) -> str:
    """Which plan is the fastest, in a sentence.

    Args:
        names: key of a plan -> its name.
        answers: key -> its answer.
    """
    fit = {key: shown for key, shown in answers.items() if shown.fits and shown.estimate is not None}
    words = ""
    if len(answers) == 2:
        words = _of_two(names, answers)
    elif not fit:
        words = "None of these plans fits."
    else:
        steps = {key: shown.estimate.step_ms for key, shown in fit.items() if shown.estimate is not None}
        first = min(steps, key=lambda key: steps[key])
        late = [key for key in steps if steps[key] > 1.005 * steps[first]]
        words = f"<b>{escape(names[first])}</b> is predicted to be the fastest"
        if not late:
            words = "The plans that fit are predicted to take the same time."
        elif len(late) < len(steps) - 1:
            words = f"<b>{escape(names[first])}</b> is among the fastest"
        if late:
            last = max(late, key=lambda key: steps[key])
            words += f"; {escape(names[last])} takes {number(steps[last] / steps[first])} times as long."
        if len(fit) < len(answers):
            words += f" {len(answers) - len(fit)} of {len(answers)} do not fit."
    return f'<div role="status" aria-live="polite">{words}</div>'


def _of_two(names: Mapping[str, str], answers: Mapping[str, Answer]) -> str:
    (one, mine), (two, other) = answers.items()
    called = {key: escape(_CALLED.get(names[key], names[key])) for key in names}
    sentence = {key: name[0].upper() + name[1:] for key, name in called.items()}
    if mine.problem or other.problem:
        if mine.problem and other.problem:
            return "Neither plan fits."
        late, fits = (one, two) if mine.problem else (two, one)
        return f"{sentence[late]} does not fit, {called[fits]} does."
    if mine.estimate is None or other.estimate is None:
        return ""
    if mine.question.key == other.question.key:
        return "Every table is on auto: your plan is the planner's. Choose a scheme for a table to compare."
    ratio = mine.estimate.step_ms / other.estimate.step_ms if other.estimate.step_ms else 1.0
    if abs(ratio - 1) < 0.005:
        return "Both plans take the same time."
    if ratio > 1:
        return f"{sentence[one]} is predicted to take <b>{number(ratio)} times as long</b> as {called[two]}."
    return f"{sentence[one]} is predicted to be <b>{number(1 / ratio)} times as fast</b> as {called[two]}."


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


def picture(markup: str, unfinished: bool = False) -> str:
    busy = ' aria-busy="true" style="opacity:.5"' if unfinished else ""
    return f'<div style="color:var(--jp-ui-font-color1,inherit)"><div{busy}>{markup}</div></div>'


def stale(shown: str) -> str:
    """A picture whose successor is being computed."""
    return shown.replace("<div><svg", '<div aria-busy="true" style="opacity:.5"><svg', 1)


def choices_table(choices: Sequence[Choice], pinned: bool) -> str:
    """The tables that the planner puts under another scheme, and why."""
    if pinned:
        return note("The planner's choices are compared with these settings: move a slider to see which change.")
    if not choices:
        return note("The planner puts every table under the same scheme as where the sliders were pinned.")
    body = "".join(
        f'<tr data-table="{escape(each.table, quote=True)}" data-before="{each.before}" data-after="{each.after}">'
        f'<th scope="row">{escape(each.table)}</th>'
        + "".join(f"<td>{escape(cell)}</td>" for cell in _choice(each))
        + "</tr>"
        for each in choices
    )
    tables = f"{len(choices)} table{'s' * (len(choices) > 1)}"
    head = "".join(f'<th scope="col">{name}</th>' for name in ("table", "was", "is now", "why"))
    return (
        f'<div role="status">The planner changes its choice for {tables} since the pin.</div>'
        f'<div class="rs-scroll" tabindex="0" role="region" aria-label="Choices that change">'
        f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def _choice(choice: Choice) -> tuple[str, ...]:
    before, after = (look_of(name, SCHEMES).label for name in (choice.before, choice.after))
    return before, after, choice.why or "looking …"


def code(python: str, summary: str = "The same in Python", side: str = "") -> str:
    """The Python equivalent."""
    where = f' data-side="{escape(side, quote=True)}"' if side else ""
    return (
        f"<details{where}><summary>{escape(summary)}</summary>"
        f'<pre tabindex="0" aria-label="{escape(summary, quote=True)}">{escape(python)}</pre></details>'
    )


def diff_table(found: PlanDiff, before: str, after: str) -> str:
    """What changes from one plan to another: where tables lie, what that moves, what each move costs alone."""
    changes = sorted(found.changed, key=lambda change: -abs(change.more_ms or 0.0))
    more = found.after.step_ms - found.before.step_ms
    total = f"{_signed(more)} a step" if changes else "no table changes"
    moved = f"{len(changes)} of {len(found.tables)} tables change, {bytes_text(found.moved_bytes)} move between ranks"
    told = f"From {before} to {after}: {moved}, {total}." if changes else f"From {before} to {after}: {total}."
    words = f'<div role="status" data-more-ms="{more!r}" data-moved-bytes="{found.moved_bytes}">{escape(told)}</div>'
    if not changes:
        return words
    heads = ("table", "changes", before, after, "moves", "this table alone")
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in heads)
    body = "".join(
        f'<tr data-table="{escape(change.table, quote=True)}" data-more-ms="{change.more_ms!r}" '
        f'data-moved-bytes="{change.moved_bytes}"><th scope="row">{escape(change.table)}</th>'
        + "".join(f"<td>{escape(cell)}</td>" for cell in _change(change))
        + "</tr>"
        for change in changes
    )
    hint = "This table alone: it moves and all others stay. Tables share phases, so these figures do not add up."
    return (
        f'{words}<div class="rs-scroll" tabindex="0" role="region" aria-label="What changes">'
        f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>{note(hint)}"
    )


def _change(change: TableChange) -> tuple[str, ...]:
    where = ("-" if side is None else sharding_text(side) for side in (change.before, change.after))
    return ", ".join(change.changed), *where, bytes_text(change.moved_bytes), _signed(change.more_ms)


def _signed(ms: float | None) -> str:
    """What a move costs or saves, in words as well as by its sign."""
    if ms is None:
        return ""
    if abs(ms) < LEAST_MS:
        return "the same"
    return f"{'costs' if ms > 0 else 'saves'} {ms_text(abs(ms))}"


def escaped(words: str) -> str:
    return escape(words)


def gone(markup: str) -> str:
    """Figures of ranks that have ended, greyed."""
    return f'<div class="rs-gone">{markup}</div>' if markup else ""


def alert(words: str) -> str:
    """A sentence that something went wrong; line breaks are kept."""
    return f'<div class="rs-alert" role="alert">{escape(words)}</div>'


def note(words: str) -> str:
    return f'<div role="status">{escape(words)}</div>'
