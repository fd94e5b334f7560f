"""Sizes of memory that a user writes: ``80``, ``80GB``, ``80GiB``."""

import re

_UNITS = {unit: 1000**power for power, unit in enumerate(("B", "KB", "MB", "GB", "TB"))}
_UNITS |= {unit: 1024**power for power, unit in enumerate(("KiB", "MiB", "GiB", "TiB"), 1)}
_BYTES = {unit.lower(): size for unit, size in _UNITS.items()}
_SIZE = re.compile(r"\s*([0-9._]+(?:e[-+]?[0-9]+)?)\s*([a-z]*)\s*", re.IGNORECASE)


def size_in(unit: str, text: str) -> float:
    """A size as a number of `unit`. A number without a unit is in `unit`; GB is 1e9 bytes, GiB is 2**30 bytes.

    Raises:
        ValueError: no number, an unknown unit, or a size that is not above zero.

    >>> size_in("GB", "80"), size_in("GB", "80GB"), size_in("GB", "80 GiB"), size_in("MB", "1.5GB")
    (80.0, 80.0, 85.89934592, 1500.0)
    """
    fix = f"Fix: write 80{unit}, or 80{unit[0]}iB for powers of two"
    match = _SIZE.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is not a size: expected a number and a unit. {fix}.")
    number, name = match.groups()
    if name and name.lower() not in _BYTES:
        raise ValueError(f"{text!r} is not a size: {name!r} is not a unit of {', '.join(_UNITS)}. {fix}.")
    try:
        value = float(number)
    except ValueError:
        raise ValueError(f"{text!r} is not a size: {number!r} is not a number. {fix}.") from None
    if not 0 < value < float("inf"):
        raise ValueError(f"{text!r} is not a size: it must be above 0. {fix}.")
    return value * _BYTES[name.lower() or unit.lower()] / _UNITS[unit]


def gigabytes(text: str) -> float:
    """`size_in` with the unit GB, for parsers of options.

    >>> gigabytes("512MB")
    0.512
    """
    return size_in("GB", text)
