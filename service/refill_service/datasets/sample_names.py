"""Where does the name of a sample end in the name of a file: at its first dot, or at its last?

WebDataset's rule is the first: ``0001.jpg``, ``0001.json`` and ``0001.seg.png`` are members of sample 0001. Of photos
it is the last: ``IMG_2024.01.01.jpg`` and ``IMG_2024.01.02.jpg`` are two. What tells them apart is who stands beside a
name with several dots: in WebDataset a file with one (``0001.jpg``), or the same members in every sample.
"""

from __future__ import annotations

import sqlite3
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter

from refill.errors import InvalidInput

FIRST, LAST = "first-dot", "last-dot"
RULES = ("auto", FIRST, LAST)

_MAX_KINDS = 64
"""Of samples, by which members they have. A folder with more of them is not made of samples."""


@dataclass(frozen=True)
class Split:
    """At which dot the names of files are split, and why."""

    at: str
    """``first-dot`` or ``last-dot``."""
    num_dotted: int = 0
    """Files with more than one dot in their names: for others it is the same."""
    example: str = ""
    """One of these files that speaks for what was chosen."""


def split_name(name: str, at: str) -> tuple[str, str]:
    """Stem and extension of a base name. Whoever reads tars splits at the first dot: in a stem it is ``%2E``."""
    stem, _, extension = name.partition(".") if at == FIRST or "." not in name else name.rpartition(".")
    return stem.replace(".", "%2E"), extension


def choose_split(rule: str, database: sqlite3.Connection, num_dotted: int) -> Split:
    """:param database: with a table ``member`` (key, extension, path, ...), of names split at the first dot."""
    if rule not in RULES:
        raise InvalidInput(f"names are split at the first-dot or the last-dot, or by auto, got {rule!r}")
    if rule != "auto" or num_dotted == 0:
        return Split(LAST if rule == LAST else FIRST, num_dotted)
    # Of each sample with a dot in an extension: whether it has a member without one beside it.
    database.execute(
        "CREATE TEMP TABLE dotted AS SELECT key, min(instr(extension, X'2E') > 0) AS alone FROM member"
        " GROUP BY key HAVING max(instr(extension, X'2E') > 0)"
    )
    with_dots, alone = database.execute("SELECT count(*), total(alone) FROM dotted").fetchone()
    found = database.execute(
        "SELECT path FROM member JOIN dotted USING (key) WHERE alone = ? AND instr(extension, X'2E') > 0 LIMIT 1",
        (int(2 * alone > with_dots),),
    ).fetchone()
    at_last = 2 * alone > with_dots and not _all_are_alike(database, int(alone))
    database.execute("DROP TABLE dotted")
    return Split(LAST if at_last else FIRST, num_dotted, bytes(found[0]).decode(errors="replace") if found else "")


def _all_are_alike(database: sqlite3.Connection, num_alone: int) -> bool:
    """Whether every sample of the folder has its members under names that come again in others: ``left.jpg``,
    ``right.jpg``. Names that begin with a digit are dates and numbers."""
    others = database.execute("SELECT 1 FROM member WHERE key NOT IN (SELECT key FROM dotted) LIMIT 1").fetchone()
    if others is not None:
        return False
    kinds: set[tuple[bytes, ...]] = set()
    rows = database.execute("SELECT key, extension FROM member ORDER BY key, extension")
    for _, group in groupby(rows, key=itemgetter(0)):
        kind = tuple(bytes(row[1]) for row in group)
        kinds.add(kind)
        if len(kinds) > min(_MAX_KINDS, num_alone // 2) or any(each[:1].isdigit() for each in kind):
            return False
    return True
