"""Which ``REFILL_`` variables does nobody read? A misspelt one would leave a default in force, an open port perhaps."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from refill.credentials import VARIABLES
from refill.environment import check_spelling
from refill_service.object_store.store_settings import StoreSettings
from refill_service.settings import Settings

__all__ = ["unread_variables"]


def unread_variables(names: Iterable[str]) -> list[str]:
    """Those that nobody reads, and that are not like any that is read.

    Raises :class:`InvalidInput` for one that is: it is misspelt.
    """
    known = {f"REFILL_{name.upper()}" for name in Settings.model_fields} | {*VARIABLES}
    known |= {f"REFILL_STORE_{field.name.upper()}" for field in dataclasses.fields(StoreSettings)}
    return check_spelling(list(names), known)
