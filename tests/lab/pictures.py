"""What tests read from a picture: its words, and its rectangles by their tooltips."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from typing import NamedTuple

SVG = "{http://www.w3.org/2000/svg}"


class Box(NamedTuple):
    """A rectangle, in pixels."""

    x: float
    y: float
    width: float
    height: float


def texts(svg: str) -> list[str]:
    """All words, in the order of drawing."""
    return [element.text or "" for element in ET.fromstring(svg).iter(f"{SVG}text")]


def boxes(svg: str) -> dict[str, Box]:
    """Tooltip -> its rectangle."""
    return {
        title.text or "": Box(*(float(rect.get(name, 0)) for name in Box._fields))
        for rect in ET.fromstring(svg).iter(f"{SVG}rect")
        if (title := rect.find(f"{SVG}title")) is not None
    }
