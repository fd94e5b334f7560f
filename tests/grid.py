"""Cases out of several axes: pairs of values by day, the whole product at night.

Tiers of tests, by two markers:

=====================  ======================================================================================
``pytest``             tests without a marker: what a change must not break, in ten minutes on two cores
``gate``               ``.ci/run`` also runs these: more world sizes, browsers, servers, notebooks
``nightly``            ``.ci/night`` also runs these: whole products, more random examples, clocks, mutants
=====================  ======================================================================================

Most faults need one value or a pair of them: a scheme, or a scheme on three ranks. A pairwise cover has every pair in
some case. Of 8 schemes x 4 world sizes x 2 optimizers it has 32 cases, and the product has 64.
"""

import inspect
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import combinations, product
from typing import Any

import pytest

NIGHT = os.environ.get("RECSHARD_NIGHT") == "1"
"""Whether this is ``.ci/night``."""


BY_DAY = 2
"""The number of ranks by day."""


def examples(by_day: int, at_night: int) -> int:
    """How many random examples a test draws."""
    return at_night if NIGHT else by_day


def grid(gate: Mapping[str, Iterable[Any]] | None = None, **axes: Sequence[Any]) -> tuple[list[str], list[Any]]:
    """Names and cases, both for ``pytest.mark.parametrize``. At night the product, otherwise a pairwise cover.

    Args:
        gate: axis -> values whose cases have the marker ``gate``. The other values have a pairwise cover without them.
        **axes: parameter -> its values, in the order of the test's identifier.

    >>> names, cases = grid(scheme=["table_wise", "row_wise"], ranks=[2], gate={"ranks": []})
    >>> names, [case.id for case in cases]
    (['scheme', 'ranks'], ['table_wise-W2', 'row_wise-W2'])
    """
    held = {name: list((gate or {}).get(name, ())) for name in axes}
    if unknown := set(gate or ()) - set(axes):
        raise ValueError(f"no axis is named {sorted(unknown)}; axes: {list(axes)}")
    by_day = {name: [value for value in values if value not in held[name]] for name, values in axes.items()}
    plain = pairwise(list(by_day.values())) if all(by_day.values()) else []
    cover = pairwise([list(values) for values in axes.values()], first=plain)
    cases = [_case(axes, values, [] if i < len(plain) else [pytest.mark.gate]) for i, values in enumerate(cover)]
    if NIGHT:
        rest = [values for values in product(*axes.values()) if values not in cover]
        cases += [_case(axes, values, [pytest.mark.nightly]) for values in rest]
    return list(axes), cases


def every(values: Iterable[Any], label: Callable[[Any], str] = str) -> Callable[[Callable[..., None]], Any]:
    """One test of a rule over many values, which names every offender. The value is the rule's first argument.

    >>> @every([1, 2, 3])
    ... def test_numbers_are_odd(number):
    ...     assert number % 2 == 1
    >>> test_numbers_are_odd()
    Traceback (most recent call last):
    AssertionError: 2: AssertionError...
    """

    def decorate(rule: Callable[..., None]) -> Any:
        _, *fixtures = inspect.signature(rule).parameters.values()

        def test(**given: Any) -> None:
            wrong = []
            for value in values:
                try:
                    rule(value, **given)
                except Exception as error:
                    wrong.append(f"{label(value)}: {type(error).__name__}: {error}")
            assert not wrong, "\n".join(wrong)

        test.__name__, test.__doc__, test.__module__ = rule.__name__, rule.__doc__, rule.__module__
        test.__signature__ = inspect.Signature(fixtures)  # type: ignore[attr-defined]
        test.pytestmark = getattr(rule, "pytestmark", [])  # type: ignore[attr-defined]
        return test

    return decorate


def worlds(*sizes: int) -> list[Any]:
    """World sizes as ``params=`` of a fixture of ranks: two ranks by day, other sizes in the gate.

    >>> [(size.id, [mark.name for mark in size.marks]) for size in worlds(1, 2)]
    [('W1', ['gate']), ('W2', [])]
    """
    return [pytest.param(n, id=f"W{n}", marks=[] if n == BY_DAY else [pytest.mark.gate]) for n in sizes]


def on_ranks(*sizes: int, night: Sequence[int] = (), **axes: Sequence[Any]) -> pytest.MarkDecorator:
    """Parametrizes a test by its fixture ``ranks`` and other axes: two ranks by day, other sizes in the gate."""
    sizes = (*sizes, *(night if NIGHT else ()))
    names, cases = grid(gate={"ranks": [n for n in sizes if n != BY_DAY]}, ranks=sizes, **axes)
    return pytest.mark.parametrize(names, cases, indirect=["ranks"])


def pairwise(axes: list[list[Any]], first: Sequence[tuple[Any, ...]] = ()) -> list[tuple[Any, ...]]:
    """Rows of the product of the axes in which every pair of values of two axes occurs, greedily few.

    Args:
        axes: the values of each.
        first: rows to begin with.

    >>> pairwise([[0, 1], ["a", "b"], [False, True]])
    [(0, 'a', False), (0, 'b', True), (1, 'a', True), (1, 'b', False)]
    """
    everything = [tuple(zip(range(len(axes)), row, strict=True)) for row in product(*(range(len(a)) for a in axes))]
    width = min(2, len(axes))
    positions = [tuple((axis, axes[axis].index(value)) for axis, value in enumerate(row)) for row in first]
    missing = {pair for row in everything for pair in combinations(row, width)}
    missing -= {pair for row in positions for pair in combinations(row, width)}
    while missing:
        row = max(everything, key=lambda row: sum(pair in missing for pair in combinations(row, width)))
        missing -= set(combinations(row, width))
        positions.append(row)
    return [tuple(axes[axis][value] for axis, value in row) for row in positions]


def _case(axes: Mapping[str, Sequence[Any]], values: Sequence[Any], marks: list[Any]) -> Any:
    labels = [_label(name, axes[name], value) for name, value in zip(axes, values, strict=True)]
    return pytest.param(*values, id="-".join(labels), marks=marks)


def _label(axis: str, values: Sequence[Any], value: Any) -> str:
    if axis in ("ranks", "world_size", "world"):
        return f"W{value}"
    if isinstance(value, str | int | float | None):
        return str(value)
    return getattr(value, "__name__", f"{axis}{list(values).index(value)}")
