"""Number formats of rows and gradients in messages: bytes, and passes over memory. ``comm`` implements them.

An embedding row of c columns takes ``element_bytes * c + row_bytes``. Encoding and decoding cost memory passes over the
fp32 rows: one thread on CPU, 16,384 x 64 rows, best of 15, where a plain copy runs at 53 GB/s, encodes FP16 at 27.6 and
BF16 at 24.9 GB/s (2 passes), INT8 at 8.4 (6.3 passes), and decodes all of them at 64 to 70 (1 pass).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from recshard_lab.sharding.plan.types import nearest


@dataclass(frozen=True)
class WireFormat:
    """A number format on the wire.

    Attributes:
        element_bytes: of one number; row_bytes: on top, for each embedding row.
        encode_passes, decode_passes: over the fp32 rows.
        adds: whether sums of encoded rows decode to the sum, which a reduce-scatter needs.
    """

    element_bytes: float
    row_bytes: float = 0.0
    encode_passes: float = 0.0
    decode_passes: float = 0.0
    adds: bool = True

    @property
    def ratio(self) -> float:
        """Bytes for one byte of fp32, without those that every row has on top."""
        return self.element_bytes / 4


WIRE_FORMATS: dict[str, WireFormat] = {
    "fp32": WireFormat(4),
    "fp16": WireFormat(2, 0, 2.0, 1.0),
    "bf16": WireFormat(2, 0, 2.0, 1.0),
    "int8": WireFormat(1, 8, 6.3, 1.0, adds=False),
}


def codec_names(given: Any) -> tuple[str, str]:
    """The formats of rows, and of their gradients.

    Args:
        given: "fp16" for both, "fp16/bf16" for rows and gradients, a pair of names or of `CommType`, a `QCommsConfig`.

    Raises:
        ValueError: another thing, or a format that does not exist.

    >>> codec_names("fp16/bf16"), codec_names("int8")
    (('fp16', 'bf16'), ('int8', 'int8'))
    """
    if hasattr(given, "forward_precision") and hasattr(given, "backward_precision"):
        given = (given.forward_precision, given.backward_precision)
    if isinstance(given, str):
        forward, slash, backward = given.partition("/")
        given = (forward, backward if slash else forward)
    elif hasattr(given, "value"):
        given = (given, given)
    if not isinstance(given, Sequence) or len(given) != 2:
        raise ValueError(f"codecs must be a format, or a pair (of rows, of gradients), got {given!r:.80}. Fix: 'fp16'")
    names = [str(getattr(one, "value", one)).strip().lower() for one in given]
    for name in names:
        if name not in WIRE_FORMATS:
            known = ", ".join(WIRE_FORMATS)
            raise ValueError(
                f"codecs: {name!r:.40} is not a number format{nearest(name, WIRE_FORMATS)}. Fix: use one of {known}"
            )
    return names[0], names[1]


def codecs_text(pair: tuple[str, str]) -> str:
    """A pair of formats as short text.

    >>> codecs_text(("fp16", "fp16")), codecs_text(("fp16", "bf16"))
    ('fp16', 'fp16/bf16')
    """
    return pair[0] if pair[0] == pair[1] else "/".join(pair)
