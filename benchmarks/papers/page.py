"""A row of the page of ``make papers``: what a table or figure of a paper says, and what comes out here."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

__all__ = ["Row", "print_rows"]


@dataclass(frozen=True)
class Row:
    what: str
    expected: str
    """As the paper prints it, or as an outside simulation of its rules says (EXACT in the row)."""
    got: str


def print_rows(title: str, rows: Iterable[Row]) -> None:
    print(f"\n{title}\n{'':62} {'expected':>12} {'got':>12}")
    for row in rows:
        print(f"{row.what:62} {row.expected:>12} {row.got:>12}", flush=True)
