"""What a planned job's order follows from, and the name of that: plan_id.

Two that have the same plan_id have the same sample at every position of every epoch. It is all that pods and ranks have
to agree on.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from refill.errors import InvalidInput

PLAN_VERSION = 1
"""Of the function. Whatever changes an order is a new version."""
STORED_ORDER = "stored order"
"""The selection of a job that is not shuffled: position p is sample p."""
WITHIN_CLASSES_VERSION = 2
"""Of the plans of batches of classes (``class_plan.py``)."""
WITHIN_CLASSES = "within:"
"""With it begins the selection of batches of classes that have each sample once. By others, samplers compose batches of
the plan's own order."""
MOST_SELECTION = 64
"""Characters of it."""


@dataclass(frozen=True)
class PlanSettings:
    """Raises :class:`InvalidInput` with one line that names the setting."""

    dataset: str
    """The dataset's fingerprint."""
    num_samples: int
    chunk_size: int
    """K, samples that are read together."""
    num_shares: int
    """V, parts of the dataset with a plan of their own, which are dealt to pods."""
    memory_bytes: int
    """M, what memory is planned for: of all pods together, for samples."""
    run: int = 64
    """s, about how many consecutive positions are of one share."""
    seed: int = 0
    selection: str = ""
    """Digest of what the order is composed by: classes, weights, a part of the samples. Empty: every sample once."""
    version: int = PLAN_VERSION
    read_seed: int | None = None
    """Draws the order in which chunks are read, and ``seed`` all else. None: ``seed`` draws that, too."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value, wanted = getattr(self, field.name), str(field.type).removesuffix(" | None")
            if type(value).__name__ != wanted and not (value is None and field.default is None):
                raise InvalidInput(f"plan setting {field.name} must be {wanted}, got {value!r}")
        for name, least, most in (
            ("num_samples", 0, 2**40),
            ("chunk_size", 1, 2**16),
            ("num_shares", 1, 2**16),
            ("memory_bytes", 0, 2**60),
            ("run", 1, 2**20),
            ("seed", -(2**63), 2**63 - 1),
            ("read_seed", -(2**63), 2**63 - 1),
        ):
            value = getattr(self, name)
            if value is not None and not least <= value <= most:
                raise InvalidInput(f"plan setting {name} must be {least} to {most}, got {value}")
        if len(self.selection) > MOST_SELECTION:
            raise InvalidInput(f"plan setting selection has {len(self.selection)} characters, {MOST_SELECTION} at most")
        if self.version not in (PLAN_VERSION, WITHIN_CLASSES_VERSION):
            raise InvalidInput(
                f"plan version {self.version} is not known here; versions {PLAN_VERSION} and {WITHIN_CLASSES_VERSION} "
                "are"
            )
        if (self.version == WITHIN_CLASSES_VERSION) != is_within_classes(self.selection):
            raise InvalidInput(
                f"plan version {self.version} does not go with selection {self.selection!r}: begin the epoch anew, "
                "without the state"
            )

    @property
    def keeps_stored_order(self) -> bool:
        return self.selection == STORED_ORDER

    @cached_property
    def plan_id(self) -> str:
        """32 hexadecimal digits."""
        text = json.dumps(self.to_dict(), sort_keys=True, separators=(",", ":"))
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    def policy_settings(self) -> dict[str, Any]:
        """Those of a job whose plan this is."""
        found: dict[str, Any] = {"plan_bytes": self.memory_bytes, "shares": self.num_shares, "run": self.run}
        return found | ({"selection": self.selection} if self.selection else {})

    def to_dict(self) -> dict[str, Any]:
        """For JSON. A plan without a ``read_seed`` is what it was before there were any."""
        found = dataclasses.asdict(self)
        if self.read_seed is None:
            del found["read_seed"]
        return found

    @classmethod
    def from_dict(cls, given: Any) -> PlanSettings:
        """Build from decoded JSON. Raises :class:`InvalidInput` for what is no plan."""
        names = {setting.name for setting in dataclasses.fields(cls)} - {"read_seed"}
        if not isinstance(given, dict) or set(given) - {"read_seed"} != names:
            raise InvalidInput(f"a plan is an object with {', '.join(sorted(names))}, got {str(given)[:100]!r}")
        return cls(**given)


def is_within_classes(selection: str) -> bool:
    """Whether a job with this selection is planned within classes."""
    return selection.startswith(WITHIN_CLASSES)
