"""Which ``REFILL_`` variables does nobody read? A misspelt one would leave a default in force, an open port perhaps."""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Iterable

from refill.credentials import CA_FILE_VARIABLE, TOKEN_FILE_VARIABLE, TOKEN_VARIABLE
from refill.errors import InvalidInput
from refill_service.object_store.store_settings import StoreSettings
from refill_service.settings import Settings

__all__ = ["unread_variables"]

_OF_CLIENTS = {CA_FILE_VARIABLE, TOKEN_FILE_VARIABLE, TOKEN_VARIABLE, "REFILL_URL"}
_OF_KUBERNETES = re.compile(r"\w+_SERVICE_(HOST|PORT)(_\w+)?|\w+_PORT_\d+_(TCP|UDP)(_\w+)?")
"""It tells pods of each service, also of one that is called refill-something."""
_ALIKE = 0.85


def unread_variables(names: Iterable[str]) -> list[str]:
    """Those that nobody reads, and that are not like any that is read.

    Raises :class:`InvalidInput` for one that is: it is misspelt.
    """
    known = {f"REFILL_{name.upper()}" for name in Settings.model_fields} | _OF_CLIENTS
    known |= {f"REFILL_STORE_{field.name.upper()}" for field in dataclasses.fields(StoreSettings)}
    unread = []
    for name in sorted(names):
        if not name.upper().startswith("REFILL_") or name.upper() in known or _OF_KUBERNETES.fullmatch(name):
            continue
        if meant := difflib.get_close_matches(name.upper(), known, 1, _ALIKE):
            raise InvalidInput(f"nobody reads the variable {name}; {meant[0]} is meant? Set that, or unset this one")
        unread.append(name)
    return unread
