"""JSON lines: a sample is a line. The names of an object are the fields; any other value is the field ``json``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from refill.formats.parsed import Parser, damaged, named


def make_parser(about: Mapping[str, Any]) -> Parser:
    def parse(data: memoryview, sample_id: int) -> tuple[str, dict[str, Any]]:
        try:
            found = json.loads(bytes(data))
        except (ValueError, RecursionError) as error:
            why = " ".join(f"{type(error).__name__}: {error}".split())[:200]
            raise damaged(sample_id, "line of JSON", 0, why) from error
        return named(found if isinstance(found, dict) else {"json": found}, sample_id)

    return parse
