"""How does a pod log? To standard error, one line an event, as text or as JSON."""

from __future__ import annotations

import json
import logging
from datetime import UTC, datetime

from refill_service.serving.request_id import current_request_id

__all__ = ["begin_logging"]

_TEXT = "%(asctime)s %(levelname)s %(name)s: %(message)s%(request)s"


def begin_logging(level: str, log_format: str, ordinal: int) -> None:
    """:param log_format: ``text`` or ``json``."""
    handler = logging.StreamHandler()
    handler.addFilter(_add_request_id)
    handler.setFormatter(_Json(ordinal) if log_format == "json" else logging.Formatter(_TEXT))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)


def _add_request_id(record: logging.LogRecord) -> bool:
    request_id = current_request_id()
    vars(record).update(request_id=request_id, request=f" [{request_id}]" if request_id else "")
    return True


class _Json(logging.Formatter):
    """An object a line: what log collectors read without being told how."""

    def __init__(self, ordinal: int) -> None:
        super().__init__()
        self._ordinal = ordinal

    def format(self, record: logging.LogRecord) -> str:
        told = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "pod": self._ordinal,
            "message": record.getMessage(),
        }
        if request_id := getattr(record, "request_id", ""):
            told["request_id"] = request_id
        if record.exc_info:
            told["exception"] = self.formatException(record.exc_info)
        return json.dumps(told)
