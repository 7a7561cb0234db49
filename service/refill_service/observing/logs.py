"""How does a pod log? To standard error, one line an event, as text or as JSON.

What a request or a dataset says is in some of it. It can't begin a line, nor colour or hide one: what is not printed as
it is stands as an escape. Third parties' loggers stay at INFO or above: at DEBUG they tell secrets (botocore's those
of STS and web identities).
"""

from __future__ import annotations

import json
import logging
from datetime import UTC, datetime

from refill_service.observing.tracing import current_request_id

_TEXT = "%(asctime)s %(levelname)s %(name)s: %(message)s%(request)s"
_OWN_LOGGERS = ("refill", "refill_service")


def begin_logging(level: str, log_format: str, ordinal: int) -> None:
    """:param log_format: ``text`` or ``json``."""
    handler = logging.StreamHandler()
    handler.addFilter(_may_be_logged)
    handler.addFilter(_add_request_id)
    handler.setFormatter(_Json(ordinal) if log_format == "json" else _Text(_TEXT))
    least = logging.getLevelNamesMapping()[level.upper()]
    logging.basicConfig(level=max(least, logging.INFO), handlers=[handler], force=True)
    for name in _OWN_LOGGERS:
        logging.getLogger(name).setLevel(least)


def _may_be_logged(record: logging.LogRecord) -> bool:
    """A library that sets its own level is not believed either."""
    return record.levelno >= logging.INFO or record.name.partition(".")[0] in _OWN_LOGGERS


def _add_request_id(record: logging.LogRecord) -> bool:
    request_id = current_request_id()
    vars(record).update(request_id=request_id, request=f" [{request_id}]" if request_id else "")
    return True


def _escaped(text: str) -> str:
    """The same text where all of it can be printed, on one line."""
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)


class _Text(logging.Formatter):
    """Lines for people: a line of a message or of an error is never taken for an event of its own."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802  (its name in logging)
        return _escaped(super().formatMessage(record))

    def formatException(self, ei: object) -> str:  # noqa: N802
        """Indented: no line of it looks like the beginning of an event."""
        lines = super().formatException(ei).split("\n")  # type: ignore[arg-type]
        return "\n".join(f"  {_escaped(line)}" for line in lines)


class _Json(logging.Formatter):
    """An object a line: what log collectors read as it is."""

    def __init__(self, ordinal: int) -> None:
        super().__init__()
        self._ordinal = ordinal

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "pod": self._ordinal,
            "message": _escaped(record.getMessage()),
        }
        if request_id := getattr(record, "request_id", ""):
            line["request_id"] = request_id
        line |= getattr(record, "fields", {})
        if record.exc_info:
            line["exception"] = "\n".join(map(_escaped, self.formatException(record.exc_info).split("\n")))
        return json.dumps(line)
