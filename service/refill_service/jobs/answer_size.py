"""Is an answer larger than one may be? Asked before its bytes are read, as far as they are known then."""

from __future__ import annotations

from refill.errors import RequestTooLarge

__all__ = ["AnswerSize"]


class AnswerSize:
    """Adds up the parts of one answer, which come from several owners, and refuses what is too large."""

    def __init__(self, limit_bytes: int, whole: AnswerSize | None = None) -> None:
        self._limit_bytes = limit_bytes
        self._whole = whole
        self._size_bytes = 0

    def part(self) -> AnswerSize:
        """Of it, which may be tried again."""
        return AnswerSize(self._limit_bytes, self)

    def add(self, more_bytes: int) -> None:
        """Fact: so much more will be part of it. Raises :class:`RequestTooLarge` when that is too much."""
        if self._whole is not None:
            self._whole.add(more_bytes)
        self.check(self._size_bytes + more_bytes)
        self._size_bytes += more_bytes

    def forget(self) -> None:
        """Fact: what was added to this part does not come."""
        if self._whole is not None:
            self._whole._size_bytes -= self._size_bytes
        self._size_bytes = 0

    def check(self, size_bytes: int) -> None:
        """Raises :class:`RequestTooLarge` when an answer may not have so many bytes."""
        if size_bytes > self._limit_bytes:
            raise RequestTooLarge(
                f"these samples take about {size_bytes:,} bytes, and a pod answers with {self._limit_bytes:,} at most: "
                "ask for fewer at once, or raise sending_bytes",
                limit_bytes=self._limit_bytes,
            )
