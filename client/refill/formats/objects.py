"""Plain files: a sample is a file, one field, with the extension that all of them have, or ``image``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from refill.formats.parsed import Coded, Parser


def make_parser(about: Mapping[str, Any]) -> Parser:
    field, kind = str(about["field"]), str(about["kind"])
    if field.startswith("__"):
        raise ValueError(f"no name of a field: {field!r:.40}")

    def parse(data: memoryview, sample_id: int) -> tuple[str, dict[str, Any]]:
        return str(sample_id), {field: Coded(kind, data)}

    return parse
