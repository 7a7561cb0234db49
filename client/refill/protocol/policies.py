"""Which policies may a job name, and which settings does each have of its own?

Both sides check a job's settings with this table, so that a wrong name ends in one line where it was written. What the
policies do is in ``refill_service/cache_core/policies/``, a file for each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from refill.errors import InvalidInput


@dataclass(frozen=True)
class PolicySetting:
    """A setting that only some policies have."""

    name: str
    default: str | int | float | bool
    about: str
    choices: tuple[str, ...] = ()
    """Of a text: all that it may be."""
    least: float | None = None
    most: float | None = None
    texts: tuple[str, ...] = ()
    """Of a number: what may stand in its place."""

    def check(self, policy: str, value: object) -> None:
        """Raises :class:`InvalidInput`."""
        which = f"setting {self.name} of policy {policy}"
        if self.texts and value in self.texts:
            return
        wanted = int if self.texts else type(self.default)
        if wanted is float and type(value) is int:
            value = float(value)
        if type(value) is not wanted:
            raise InvalidInput(f"{which} must be {' or '.join([wanted.__name__, *self.texts])}, got {value!r}")
        if self.choices and value not in self.choices:
            raise InvalidInput(f"{which} must be {' or '.join(self.choices)}, got {value!r}")
        if isinstance(value, int | float):
            if self.least is not None and not value >= self.least:
                raise InvalidInput(f"{which} must be at least {self.least}, got {value}")
            if self.most is not None and not value <= self.most:
                raise InvalidInput(f"{which} must be at most {self.most}, got {value}")


@dataclass(frozen=True)
class PolicyTerms:
    """What clients have to know of a policy: its label and its settings."""

    label: str
    """For people, in a few words."""
    settings: tuple[PolicySetting, ...] = ()
    check_together: Callable[[Mapping[str, Any]], None] | None = None
    """Raises :class:`InvalidInput` for settings that do not go with each other; it is given all of them."""

    def settings_with(self, policy: str, given: Mapping[str, Any]) -> dict[str, Any]:
        """All settings of the policy: those given, and the defaults of the others. Raises :class:`InvalidInput`."""
        known = {setting.name: setting for setting in self.settings}
        if unknown := sorted(set(given) - set(known)):
            there_are = f"there are: {', '.join(sorted(known))}" if known else "it has none of its own"
            raise InvalidInput(f"policy {policy} has no setting {unknown[0]!r}; {there_are}")
        for name, value in given.items():
            known[name].check(policy, value)
        found = {name: given.get(name, setting.default) for name, setting in known.items()}
        if self.check_together is not None:
            self.check_together(found)
        return found


def _check_exact(settings: Mapping[str, Any]) -> None:
    if settings["fetch_size"] and settings["eviction"] != "fifo":
        raise InvalidInput(f"setting fetch_size of policy exact goes with eviction fifo, got {settings['eviction']!r}")
    if settings["fetch_threshold"] != "auto" and not settings["fetch_size"]:
        raise InvalidInput("setting fetch_threshold of policy exact goes with fetch_size")


POLICIES: dict[str, PolicyTerms] = {
    "planned": PolicyTerms(
        "an order computed ahead: reads the dataset once",
        (
            PolicySetting(
                "plan_bytes",
                0,
                "memory that the order is planned for, of samples on all pods together; 0: half to 0.8 of what the "
                "pods have for the job when it is registered",
                least=0,
                most=2**60,
            ),
            PolicySetting(
                "shares",
                0,
                "parts of the dataset that have plans of their own, best a power of two; 0: two for each pod at least",
                least=0,
                most=2**16,
            ),
            PolicySetting(
                "run",
                0,
                "about how many positions in a row are of one share; 0: 64, or 32 with eight shares or fewer",
                least=0,
                most=2**20,
            ),
            PolicySetting(
                "selection",
                "",
                "digest of the classes by which samplers compose batches, which they fill in: ranks whose classes "
                "differ are refused",
            ),
        ),
    ),
    "redox": PolicyTerms(
        "the papers' protocol: re-reads chunks",
        (
            PolicySetting(
                "refill",
                "best",
                "which chunk refills: the one that fills most slots, ties at random, or any (Brand 3.3)",
                choices=("best", "random"),
            ),
        ),
    ),
    "exact": PolicyTerms(
        "the order as asked: reads chunks again",
        (
            PolicySetting(
                "eviction",
                "rolling",
                "what stays in memory; rolling, renewal: by a plan of what will be asked for; earliest: what is used "
                "next; and of samples that are read one by one, never: the first ones, fifo: those read last, lru: "
                "those used last, importance: those that training finds most important (SHADE)",
                choices=("rolling", "renewal", "earliest", "never", "fifo", "lru", "importance"),
            ),
            PolicySetting(
                "read_ahead",
                1 / 32,
                "part of memory that is only for samples that are read before they are asked for",
                least=0.0,
                most=0.5,
            ),
            PolicySetting(
                "fetch_size",
                0,
                "of fifo (DELI): so many requests to a pod are fetched together before they are asked for, in place of "
                "read_ahead; 50/50: half of what its memory holds; 0: none",
                least=0,
                most=2**16,
                texts=("50/50",),
            ),
            PolicySetting(
                "fetch_threshold",
                "auto",
                "with fetch_size: the next fetch is made when no more requests than this were fetched and are left to "
                "be asked for; auto: half of what memory holds with fetch_size 50/50, else 0",
                least=0,
                most=2**16,
                texts=("50/50", "auto"),
            ),
        ),
        _check_exact,
    ),
}


def terms_of(policy: str) -> PolicyTerms:
    """Raises :class:`InvalidInput` that lists the policies."""
    if policy not in POLICIES:
        raise InvalidInput(f"job setting policy must be {' or '.join(POLICIES)}, got {policy!r}")
    return POLICIES[policy]
