"""Refusals: an HTTP status, a reason that programs compare, and a sentence for people."""

from __future__ import annotations

from typing import Any


class Refused(Exception):
    """A request that is answered with an error.

    Args:
        status: HTTP status, 400 to 599.
        reason: a word for programs, such as ``"queue_full"``.
        message: ``<what failed, with the value>: <why>. Fix: <one change>.``
        field: the input that failed, such as ``"sparse.movie"``.
        position: the sample that failed, counted from 0.
        retry_after_s: seconds after which the client may try again.
        close: whether the connection is closed after the answer.

    >>> Refused(422, "invalid_input", "dense.age[1]: NaN is not finite. Fix: send a number.", "dense.age", 1).body("r1")
    {'error': {'status': 422, 'reason': 'invalid_input', 'message': 'dense.age[1]: NaN is not finite. Fix: send a
    number.', 'field': 'dense.age', 'position': 1, 'request_id': 'r1'}}
    """

    def __init__(
        self,
        status: int,
        reason: str,
        message: str,
        field: str | None = None,
        position: int | None = None,
        *,
        retry_after_s: int | None = None,
        close: bool = False,
    ) -> None:
        super().__init__(message)
        self.status, self.reason, self.message = status, reason, message
        self.field, self.position = field, position
        self.retry_after_s, self.close = retry_after_s, close

    def body(self, request_id: str | None) -> dict[str, Any]:
        """The JSON body of the answer. Every error of the server has this shape."""
        return {
            "error": {
                "status": self.status,
                "reason": self.reason,
                "message": self.message,
                "field": self.field,
                "position": self.position,
                "request_id": request_id,
            }
        }

    def headers(self) -> list[tuple[bytes, bytes]]:
        """Headers that belong to this status."""
        found = []
        if self.retry_after_s is not None:
            found.append((b"retry-after", str(self.retry_after_s).encode()))
        if self.status == 401:
            found.append((b"www-authenticate", b"Bearer"))
        if self.close:
            found.append((b"connection", b"close"))
        return found
