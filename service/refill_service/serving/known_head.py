"""Is the head of a request the one that was understood before? Then nobody need take it apart again.

A rank asks for batch after batch with one head, in which nothing changes but the length of the body. Bytes that are the
same mean the same.
"""

from __future__ import annotations

import re
from typing import Any

__all__ = ["KnownHead"]

_ENDS = b"\r\n\r\n"
_MOST_DIGITS = 6
_LENGTH = re.compile(rb"\r\ncontent-length: ([0-9]{1,%d})\r\n" % _MOST_DIGITS, re.IGNORECASE)
_NAME = b"content-length"


class KnownHead:
    """Of a request that came as one piece of bytes, with nothing before or behind it.

    :param before, behind: what the head has before and behind the digits of its body's length.
    :param scope: as ASGI has it, as it was before anybody has looked at it.
    """

    def __init__(self, before: bytes, behind: bytes, scope: dict[str, Any]) -> None:
        self._before, self._behind, self._scope = before, behind, scope
        self._others = [(name, value) for name, value in scope["headers"] if name != _NAME]

    @classmethod
    def of(cls, piece: bytes, body: bytes, scope: dict[str, Any]) -> KnownHead | None:
        """None: the piece is not just that request, or its head does not say how long its body is in the usual way.

        :param body: as the parser has found it.
        """
        end = piece.find(_ENDS) + len(_ENDS)
        lengths = list(_LENGTH.finditer(piece, 0, end))
        is_plain = end >= len(_ENDS) and [name for name, _ in scope["headers"]].count(_NAME) == len(lengths) == 1
        if not is_plain or piece[end:] != body or int(lengths[0][1]) != len(body):
            return None
        first, last = lengths[0].span(1)
        return cls(piece[:first], piece[last:end], scope)

    def body_in(self, piece: bytes) -> bytes | None:
        """Of a request that has this head, but for the length of its body, and is all of this piece. None: it is
        not."""
        first = len(self._before)
        at = piece.find(b"\r", first, first + _MOST_DIGITS + 1)
        if at < 0 or not piece.startswith(self._before) or not piece.startswith(self._behind, at):
            return None
        length, begin = piece[first:at], at + len(self._behind)
        return piece[begin:] if length.isdigit() and int(length) == len(piece) - begin else None

    def scope(self, body_bytes: int) -> dict[str, Any]:
        """A new one, for a body of so many bytes."""
        return self._scope | {"headers": [*self._others, (_NAME, b"%d" % body_bytes)]}
