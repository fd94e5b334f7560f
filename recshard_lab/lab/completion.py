"""Completion in cells of the ranks: names come from rank 0, the notebook's own stay out of it and untouched."""

from __future__ import annotations

import re
from typing import Any

from IPython.core.completer import CompletionContext, SimpleCompletion, SimpleMatcherResult, context_matcher

from recshard_lab import launcher

__all__ = ["rank_names"]

_NAME = re.compile(r"[^\W\d]\w*(?:\.\w*)*$")


@context_matcher()  # type: ignore[misc, unused-ignore]
def rank_names(context: CompletionContext) -> SimpleMatcherResult:
    """Completes names, and attributes of objects, that live on rank 0; says nothing while the ranks are busy."""
    nothing: Any = {"completions": []}
    ranks = launcher.current()
    if ranks is None or not context.full_text.lstrip().startswith("%%recshard") or context.cursor_line == 0:
        return nothing
    word = _NAME.search(context.text_until_cursor)
    if word is None:
        return nothing
    fragment = word[0]
    kept = fragment[: len(fragment) - len(context.token)] if fragment.endswith(context.token) else ""
    found = [SimpleCompletion(text=name[len(kept) :], type="rank 0") for name in ranks.complete(fragment)]
    return {"completions": found, "matched_fragment": fragment[len(kept) :], "suppress": bool(found)}
