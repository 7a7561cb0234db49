"""Is a ``REFILL_`` variable misspelt? Nobody would read it, and a default would be in force without a word."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection

from refill.errors import InvalidInput

_OF_KUBERNETES = re.compile(r"\w+_SERVICE_(HOST|PORT)(_\w+)?|\w+_PORT_\d+_(TCP|UDP)(_\w+)?")
"""It tells pods of each service, also of one that is called refill-something."""
_ALIKE = 0.85


def check_spelling(names: Collection[str], known: Collection[str]) -> list[str]:
    """The ``REFILL_`` variables of ``names`` that are not known, and not like any that is.

    Raises :class:`InvalidInput` for one that is: it is misspelt.
    """
    unread = []
    for name in sorted(names):
        if not name.upper().startswith("REFILL_") or name.upper() in known or _OF_KUBERNETES.fullmatch(name):
            continue
        if meant := difflib.get_close_matches(name.upper(), known, 1, _ALIKE):
            raise InvalidInput(f"there is no variable {name} (is {meant[0]} meant?): set that one, or unset this one")
        unread.append(name)
    return unread
