"""What does a rank say that it has received? Its report, in JSON, which may have megabytes: read piece by piece.

``json`` and pydantic take one piece for all of it, in which a pod answers nobody; and pydantic makes a kilobyte of each
thing that is wrong, for millions of these in one report. Here only a report's few numbers go through them. Its long
lists are read into arrays of numbers, and the first thing that is wrong in them ends it.
"""

from __future__ import annotations

import json
import re
from array import array
from collections.abc import Generator
from typing import Annotated, Any, NamedTuple

import numpy as np
from pydantic import BaseModel, Field, ValidationError

from refill.errors import InvalidInput
from refill.protocol.dealing import MOST_LISTED, Dealing
from refill.protocol.receipt_digest import DigestPart
from refill.protocol.wire_format import MAX_BATCH, Int64Array
from refill_service.cache_core.planned.received import ReceivedEpochs, check_part, check_places

__all__ = ["MOST_DIGESTS", "MOST_DIGEST_SPANS", "DealtTo", "RankReport", "noted", "read_report", "report_schema"]

MOST_DIGESTS = 1000
MOST_DIGEST_SPANS = 1 << 12
"""Of a digest that has more than that, nothing is kept."""
_AT_ONCE = 500
"""Pairs, or fields, from one piece to the next."""
_MOST_FIELDS = 100
_SHORT_BYTES = 256
"""Of a field that is none of the long lists."""
_LIMIT = 1 << 62

_SPACE = re.compile(rb"[ \t\n\r]*")
_NAME = re.compile(rb'[ \t\n\r]*"([^"\\]{0,64})"[ \t\n\r]*:[ \t\n\r]*')
_PAIR = re.compile(rb"[ \t\n\r]*\[[ \t\n\r]*([0-9]{1,19})[ \t\n\r]*,[ \t\n\r]*([0-9]{1,19})[ \t\n\r]*\][ \t\n\r]*")
_SHORT = re.compile(rb'"[^"\\]*"|\[[^][{}]*\]|[-+.0-9a-zA-Z]+')
_OPENS, _CLOSES, _ENDS = (re.compile(rb"[ \t\n\r]*" + re.escape(mark) + rb"[ \t\n\r]*") for mark in (b"[", b"]", b"}"))
_COMMA = re.compile(rb"[ \t\n\r]*,[ \t\n\r]*")


class DealtTo(BaseModel):
    """How an epoch is dealt, and to which rank: see refill.protocol.dealing."""

    epoch: int = Field(ge=0, lt=2**31)
    rank: int = Field(ge=0, lt=2**20)
    num_ranks: int = Field(ge=1, le=2**20)
    batch: int = Field(1, ge=1, le=MAX_BATCH)
    start: int = Field(0, ge=0, lt=2**62)
    drop_last: bool = False


class ReportAbout(DealtTo):
    """What a report says beside its long lists."""

    listed: tuple[Annotated[int, Field(ge=0, le=MOST_LISTED)], Annotated[str, Field(max_length=64)]] | None = Field(
        None, description="How long the rank's list is, and its digest, where it asks by one."
    )


class RankReport(NamedTuple):
    """Positions of a rank that it has received, or goes on without."""

    about: ReportAbout
    spans: Int64Array
    """``(n, 2)``: ``[first, end)`` of positions in a row."""
    damaged: Int64Array
    """``(n, 2)``: position and sample of what it goes on without."""
    digests: list[DigestPart]


def read_report(body: bytes) -> Generator[None, None, RankReport]:
    """The report that ``body`` is, once all steps were made. Raises :class:`InvalidInput` for another one."""
    reading = _Reading(body)
    yield from reading.fields()
    try:
        about = ReportAbout.model_validate(reading.short)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        raise InvalidInput(f"body.{'.'.join(map(str, first['loc']))}: {first['msg']}") from None
    return RankReport(about, reading.pairs["spans"], reading.pairs["damaged"], reading.digests)


def noted(
    report: RankReport, received: ReceivedEpochs, dealing: Dealing, *, is_listed: bool, now: float
) -> Generator[None, None, None]:
    """Fact: a rank says so. All of it is noted, a little with each step, or nothing, where something is wrong with it:
    then :class:`InvalidInput` is raised.

    :param is_listed: whether ranks of the job have lists of their own.
    """
    about, positions, samples = report.about, report.damaged[:, 0], report.damaged[:, 1]
    of_whom = about.epoch, dealing, about.rank
    check_places(*of_whom, report.spans)
    check_places(*of_whom, np.stack([positions, positions + 1], axis=1))
    for part in report.digests:
        check_part(about.epoch, dealing, part)
    if about.listed is not None and is_listed:
        received.is_listed(*of_whom, *about.listed, now=now)
    received.received(*of_whom, (), now=now)
    for start in range(0, len(report.spans), _AT_ONCE):
        received.received(*of_whom, report.spans[start : start + _AT_ONCE].tolist(), now=now)
        yield
    for part in report.digests:
        received.loops_had(about.epoch, dealing, [part], now=now)
        yield
    for start in range(0, len(positions), _AT_ONCE):
        here = slice(start, start + _AT_ONCE)
        received.goes_without(*of_whom, positions[here], samples[here], now=now)
        yield


def report_schema() -> dict[str, Any]:
    """For the description of the API."""
    schema = ReportAbout.model_json_schema()
    pairs = {"type": "array", "items": {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 2}}
    digests = {"type": "array", "items": {"type": "array"}, "maxItems": MOST_DIGESTS}
    schema["properties"] |= {
        "spans": pairs | {"description": "[first, end) of positions in a row."},
        "damaged": pairs | {"description": "Position and sample of what it goes on without."},
        "digests": digests | {"description": "What the rank's loop was given: see refill.protocol.receipt_digest."},
    }
    return schema


class _Reading:
    """How far a body has been read."""

    def __init__(self, body: bytes) -> None:
        self._body, self._at = body, 0
        self.short: dict[str, Any] = {}
        self.pairs: dict[str, Int64Array] = {name: np.empty((0, 2), dtype=np.int64) for name in ("spans", "damaged")}
        self.digests: list[DigestPart] = []

    def fields(self) -> Generator[None, None, None]:
        if self._body[:1] != b"{":
            self._skip(_SPACE)
            if self._body[self._at : self._at + 1] != b"{":
                raise self._wrong("a report", "an object")
        self._at += 1
        if self._skips(_ENDS):
            return
        for _ in range(_MOST_FIELDS):
            found = _NAME.match(self._body, self._at)
            if found is None:
                raise self._wrong("a report", "the name of a field")
            self._at = found.end()
            yield from self._field(found[1].decode("utf-8", "replace"))
            if self._skips(_ENDS):
                if self._at < len(self._body):
                    raise self._wrong("a report", "nothing more")
                return
            if not self._skips(_COMMA):
                raise self._wrong("a report", "a comma")
        raise InvalidInput(f"body: a report has at most {_MOST_FIELDS} fields")

    def _field(self, name: str) -> Generator[None, None, None]:
        if name in self.pairs:
            self.pairs[name] = yield from self._pairs(name)
        elif name == "digests":
            self.digests = yield from self._digests()
        else:
            self.short[name] = self._value(name)

    def _value(self, name: str) -> Any:
        """A number, a word, or a short list of such."""
        found = _SHORT.match(self._body, self._at, self._at + _SHORT_BYTES)
        try:
            value = json.loads(found[0]) if found is not None else None
        except ValueError:
            found = None
        if found is None:
            raise self._wrong(name, "a number, or a short text")
        self._at = found.end()
        return value

    def _pairs(self, name: str) -> Generator[None, None, Int64Array]:
        numbers = array("q")
        if not self._skips(_OPENS):
            raise self._wrong(name, "a list")
        if not self._skips(_CLOSES):
            body, at, closes = self._body, self._at, False
            while not closes:
                for _ in range(_AT_ONCE):
                    found = _PAIR.match(body, at)
                    if found is None:
                        self._at = at
                        raise self._wrong(name, "a pair of numbers")
                    first, second = int(found[1]), int(found[2])
                    if first >= _LIMIT or second >= _LIMIT:
                        self._at = at
                        raise self._wrong(name, f"numbers below {_LIMIT}")
                    numbers.append(first)
                    numbers.append(second)
                    at = found.end() + 1
                    if body[at - 1 : at] != b",":
                        closes = True
                        break
                yield
            self._at = at - 1
            if not self._skips(_CLOSES):
                raise self._wrong(name, "the end of a list")
        return np.array(numbers, dtype=np.int64).reshape(-1, 2)

    def _digests(self) -> Generator[None, None, list[DigestPart]]:
        """Of at most so many that each may be a piece."""
        parts: list[DigestPart] = []
        self._expect(_OPENS, "digests", "a list")
        if self._skips(_CLOSES):
            return parts
        for _ in range(MOST_DIGESTS):
            self._expect(_OPENS, "digests", "a list of what a loop had")
            said: list[Any] = []
            for _ in DigestPart._fields[:5]:
                said.append(self._value("digests"))
                self._expect(_COMMA, "digests", "a comma")
            spans = yield from self._pairs("digests")
            self._expect(_COMMA, "digests", "a comma")
            digest = self._value("digests")
            self._expect(_CLOSES, "digests", "the end of what a loop had")
            if len(spans) <= MOST_DIGEST_SPANS:
                parts.append(DigestPart.from_list([*said, spans.tolist(), digest]))
                yield
            if self._skips(_CLOSES):
                return parts
            self._expect(_COMMA, "digests", "a comma")
        raise InvalidInput(f"body.digests: a report has at most {MOST_DIGESTS:,}; make several of it")

    def _skip(self, mark: re.Pattern[bytes]) -> None:
        found = mark.match(self._body, self._at)
        self._at = self._at if found is None else found.end()

    def _skips(self, mark: re.Pattern[bytes]) -> bool:
        before = self._at
        self._skip(mark)
        return self._at > before

    def _expect(self, mark: re.Pattern[bytes], name: str, what: str) -> None:
        if not self._skips(mark):
            raise self._wrong(name, what)

    def _wrong(self, name: str, wanted: str) -> InvalidInput:
        there = self._body[self._at : self._at + 20].decode("utf-8", "replace")
        return InvalidInput(f"body: {name} should have {wanted} at byte {self._at:,}, not {there!r}")
