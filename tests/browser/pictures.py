"""Pictures of widgets compared with references, so that fonts may differ and nothing else.

::

    picture -> means of 12 x 12 pixels, blurred a little -> share of cells that differ by more than 30 of 255 (areas)
                                                         -> all differences as a share of all ink (lines)

Words become a grey smear of about the same weight in any font; a shift, a missing part, another theme or another colour
do not. Measured on all pictures in both themes, serifs against none: at most 0.5% of the cells and 0.15 of the ink; a
shift down by 16 pixels at least 0.8% of the cells or 0.36 of the ink, a blank picture all of it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageFilter

from tests.browser.lab_server import ARTIFACTS

CELL = 12  # pixels
DIFFERENCE = 30.0  # of 255, in the channel that differs most
MOST_CELLS = 0.6  # per cent
MOST_INK = 0.2
MOST_HIGHER = 0.02  # lines may break otherwise in another font
COLOURS = 48  # of a reference
COVER = "#808080"  # over what varies

REFERENCES = Path(__file__).parent / "pictures"


def take(page: Any, place: Any, name: str, varies: tuple[str, ...] = ()) -> Path:
    """Keeps a picture of one place among the test artefacts, what varies covered.

    Args:
        page, place: playwright's page and locator.
        name: of the file, without its ending.
        varies: selectors inside `place`.
    """
    ARTIFACTS.mkdir(exist_ok=True)
    path = ARTIFACTS / f"{name}.png"
    page.mouse.move(0, 0)
    covered = [place.locator(selector) for selector in varies]
    place.screenshot(path=str(path), mask=covered, mask_color=COVER, animations="disabled", caret="hide")
    return path


def differences(picture: Image.Image, reference: Image.Image) -> str:
    """In what a picture differs from its reference, both in full or both in half size; empty where it does not."""
    (wide, high), (wanted_wide, wanted_high) = picture.size, reference.size
    if abs(wide - wanted_wide) > 2 or abs(high - wanted_high) > max(4, MOST_HIGHER * wanted_high):
        return f"{wide} x {high} pixels, the reference has {wanted_wide} x {wanted_high}"
    cell = CELL // 2
    size = max(1, wanted_wide // cell), max(1, wanted_high // cell)
    one, other = _smeared(picture, size), _smeared(reference, size)
    paper = np.median(other.reshape(-1, 3), axis=0)
    apart, ink, wanted_ink = (np.abs(a - b).max(axis=2) for a, b in ((one, other), (one, paper), (other, paper)))
    share = 100 * float((apart > DIFFERENCE).mean())
    lines = float(apart.sum() / max(1.0, ink.sum() + wanted_ink.sum()))
    if share <= MOST_CELLS and lines <= MOST_INK:
        return ""
    row, column = np.unravel_index(int(apart.argmax()), apart.shape)
    return f"{share:.1f}% of it and {lines:.2f} of its ink differ, most at x {2 * cell * column}, y {2 * cell * row}"


def _smeared(picture: Image.Image, size: tuple[int, int]) -> np.ndarray:
    small = picture.convert("RGB").resize(size, Image.Resampling.BOX)
    return np.asarray(small.filter(ImageFilter.GaussianBlur(1.0)), dtype=float)


def halved(path: Path) -> Image.Image:
    """A picture in half its size, as references are kept."""
    picture = Image.open(path).convert("RGB")
    return picture.resize((picture.width // 2, picture.height // 2), Image.Resampling.BOX)


def keep(path: Path) -> None:
    """Makes a picture the reference of its name: half size, few colours, some 20 kB."""
    REFERENCES.mkdir(exist_ok=True)
    few = halved(path).quantize(COLOURS, dither=Image.Dither.NONE)
    few.save(REFERENCES / path.name, optimize=True)


def reference(path: Path) -> Image.Image:
    """The reference of a picture.

    Raises:
        FileNotFoundError: there is none of this name.
    """
    return Image.open(REFERENCES / path.name).convert("RGB")
