"""How do people write a number of bytes? In settings, options and arguments alike."""

from __future__ import annotations

import re
from typing import Any

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


def parse_bytes(text: Any) -> Any:
    """``2GiB``, ``512Mi``, ``1500MB`` or a number of bytes -> bytes; Kubernetes' and everyday suffixes. What is no text
    is returned as it is. Raises ``ValueError``."""
    if not isinstance(text, str):
        return text
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?i?)b?\s*", text, re.IGNORECASE)
    unit = "" if match is None else match[2].lower()
    count = 2.0**63 if match is None or unit not in _UNITS else float(match[1]) * _UNITS[unit]
    if count >= 2**63:
        raise ValueError(f"{text[:20]!r} is not a number of bytes; write for example 2GiB, 512Mi or 1500MB")
    return int(count)
