"""The written parts of the widgets as HTML. Their style is in ``static/widget.css``."""

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
from recshard_lab.lab.draw.theme import SCHEMES, bytes_text, count_text, counted, look_of, ms_text, number, with_notes
from recshard_lab.launcher.errors import ranks_text
from recshard_lab.planner import PlanDiff
from recshard_lab.planner.answers.answers import LEAST_MS, TableChange
from recshard_lab.planner.answers.text import sharding_text

MOST_NAMED = 3  # tables in a card's sentence
HEADS = {"live": "Now on the ranks", "asked": "What you ask for"}
_CALLED = {"Your plan": "your plan", "The planner's plan": "the planner's plan"}
BEST = '<i class="rs-best">★ best</i>'


def facts(table: BaseEmbeddingConfig) -> str:
    """A table's size in a few words."""
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
    extra: str = "",
) -> str:
    """The numbers of one plan; ``data-`` attributes contain them unrounded.

    Args:
        side: key of the plan in the widget.
        shown: the plan and its prediction.
        measured: a `Measured`, or None.
        head: heading; by default that of `HEADS`.
        best: names of the rows in which no shown plan is better.
        compact: one number per line, for narrow cards.
        planned: names the ranks of row-wise tables if the planner chose only some ranks.
        stale: greys the numbers, because the ranks that they were measured on have ended.
        extra: a sentence about work that only the measured step contains.
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
        note_ = f" <small class='rs-ran'>predicted, {ran[row.name]} measured</small>" if row.name in ran else ""
        star = f" {BEST}" if row.name in best else ""
        label, note_ = (row.label, note_ + star) if compact else (row.label + star, note_)  # five numbers on one line
        value = row.text(values[row.name]).replace(" the mean", " <small>the mean</small>")
        entries.append((label, row.hint, value + note_))
    cap = bytes_text(float(estimate.capacity_bytes[0]))
    room = f"✓ fits, memory {cap} per rank" if estimate.fits else f"✗ does not fit, memory {cap} per rank"
    listed = "".join(f'<div title="{hint}"><span>{label} </span><b>{value}</b></div>' for label, hint, value in entries)
    problem = ""
    if shown.problem:
        problem = alert(shown.problem)
        if shown.question.plan is None:
            problem += note("These are the numbers of the plan without a memory limit.")
    sentences = [why_apart(estimate.step_ms, measured, shown.topology, extra) if measured is not None else ""]
    sentences.append(with_notes("", [getattr(measured, "times_note", "")]))
    sentences.append(_chosen_ranks(shown) if planned else "")
    why = "".join(f'<div class="rs-why">{escape(line)}</div>' for line in sentences if line)
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
    """Ranks of the row-wise tables that the planner placed on some ranks only; empty without any."""
    if shown.plan is None or shown.question.plan is not None:
        return ""
    size = shown.topology.world_size
    found = []
    for name, sharding in shown.plan.tables().items():
        ranks = sorted({shard.rank for shard in sharding.shards})
        given = shown.question.constraints.get(name)
        if given is not None and (given.ranks or given.shards):
            continue
        if sharding.sharding_type == "row_wise" and len(ranks) < size:
            found.append(f"{name} on {ranks_text(ranks)}")
    if not found:
        return ""
    rest = f" and {len(found) - MOST_NAMED} more tables" if len(found) > MOST_NAMED else ""
    return f"The planner chose ranks for row-wise tables: {', '.join(found[:MOST_NAMED])} of {size}{rest}."


def waiting(side: str, head: str, card: str) -> str:
    """A card whose numbers are being computed: the old numbers, dimmed, without ``data-`` attributes."""
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
    return f"{ms_text(shown.estimate.step_ms)} per step, {fits}"


def verdict(names: Mapping[str, str], answers: Mapping[str, Answer]) -> str:
    """Which plan is the fastest, in a sentence.

    Args:
        names: key -> name of the plan.
        answers: key -> answer.
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
        if mine.question.key == mine.question.automatic().key:
            return "Every table is on auto, so both plans are the planner's. Choose a scheme for a table to compare."
        return "Both plans have the same settings. Choose another scheme for a table of one of them to compare."
    ratio = mine.estimate.step_ms / other.estimate.step_ms if other.estimate.step_ms else 1.0
    if abs(ratio - 1) < 0.005:
        return "Both plans take the same time."
    if ratio > 1:
        return f"{sentence[one]} is predicted to take <b>{number(ratio)} times as long</b> as {called[two]}."
    return f"{sentence[one]} is predicted to be <b>{number(1 / ratio)} times as fast</b> as {called[two]}."


def badge(same: bool, head: str, words: str, apart: float = 0.0) -> str:
    """The result of a check, framed.

    Args:
        same: whether it passed.
        head: the result in a few words.
        words: the rest of the sentence.
        apart: largest relative difference, as ``data-apart``.
    """
    return (
        f'<div role="status" class="rs-badge" data-same="{str(same).lower()}" data-apart="{apart!r}">'
        f"<b>{'✓' if same else '✗'} {head}</b>{words}</div>"
    )


def picture(markup: str, unfinished: bool = False) -> str:
    """A picture; an unfinished one is dimmed."""
    busy = ' aria-busy="true" style="opacity:.5"' if unfinished else ""
    return f'<div style="color:var(--jp-ui-font-color1,inherit)"><div{busy}>{markup}</div></div>'


def choices_table(choices: Sequence[Choice], pinned: bool) -> str:
    """The tables for which the planner chooses another scheme, and why."""
    if pinned:
        return note("These settings are pinned. Move a slider to see which choices of the planner change.")
    if not choices:
        return note("The planner chooses the same scheme for every table as at the pinned settings.")
    body = "".join(
        f'<tr data-table="{escape(each.table, quote=True)}" data-before="{each.before}" data-after="{each.after}">'
        f'<th scope="row">{escape(each.table)}</th>'
        + "".join(f"<td>{escape(cell)}</td>" for cell in _choice(each))
        + "</tr>"
        for each in choices
    )
    words = f"The planner changes its choice for {counted(len(choices), 'table')} since the pin."
    return note(words) + _scrolled("Choices that change", ("table", "was", "is now", "why"), body)


def _choice(choice: Choice) -> tuple[str, ...]:
    before, after = (look_of(name, SCHEMES).label for name in (choice.before, choice.after))
    return before, after, choice.why or "computing …"


def _scrolled(label: str, heads: Sequence[str], body: str) -> str:
    """A table that scrolls."""
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in heads)
    return (
        f'<div class="rs-scroll" tabindex="0" role="region" aria-label="{label}">'
        f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def code(python: str, summary: str = "The same in Python", side: str = "") -> str:
    """Python, folded."""
    where = f' data-side="{escape(side, quote=True)}"' if side else ""
    return (
        f"<details{where}><summary>{escape(summary)}</summary>"
        f'<pre tabindex="0" aria-label="{escape(summary, quote=True)}">{escape(python)}</pre></details>'
    )


def diff_table(found: PlanDiff, before: str, after: str) -> str:
    """The changes from one plan to another: placement, bytes that move, and the effect of each change alone."""
    changes = sorted(found.changed, key=lambda change: -abs(change.more_ms or 0.0))
    more = found.after.step_ms - found.before.step_ms
    total = f"{_signed(more)} per step" if changes else "no table changes"
    moved = f"{len(changes)} of {len(found.tables)} tables change, {bytes_text(found.moved_bytes)} move between ranks"
    line = f"From {before} to {after}: {moved}, {total}." if changes else f"From {before} to {after}: {total}."
    words = f'<div role="status" data-more-ms="{more!r}" data-moved-bytes="{found.moved_bytes}">{escape(line)}</div>'
    if not changes:
        return words
    body = "".join(
        f'<tr data-table="{escape(change.table, quote=True)}" data-more-ms="{change.more_ms!r}" '
        f'data-moved-bytes="{change.moved_bytes}"><th scope="row">{escape(change.table)}</th>'
        + "".join(f"<td>{escape(cell)}</td>" for cell in _change(change))
        + "</tr>"
        for change in changes
    )
    heads = ("table", "changes", before, after, "moves", "this table alone")
    hint = "This table alone: only it changes. Tables share phases, so these figures are not additive."
    return words + _scrolled("Changes", heads, body) + note(hint)


def _change(change: TableChange) -> tuple[str, ...]:
    where = ("-" if side is None else sharding_text(side) for side in (change.before, change.after))
    return ", ".join(change.changed), *where, bytes_text(change.moved_bytes), _signed(change.more_ms)


def _signed(ms: float | None) -> str:
    """Milliseconds more or less, in words."""
    if ms is None:
        return ""
    if abs(ms) < LEAST_MS:
        return "the same"
    return f"{'costs' if ms > 0 else 'saves'} {ms_text(abs(ms))}"


def gone(markup: str) -> str:
    """Figures of ranks that have ended, greyed."""
    return f'<div class="rs-gone">{markup}</div>' if markup else ""


def alert(words: str) -> str:
    """An error; its line breaks stay."""
    return f'<div class="rs-alert" role="alert">{escape(words)}</div>'


def note(words: str) -> str:
    """A sentence that screen readers announce."""
    return f'<div role="status">{escape(words)}</div>'
