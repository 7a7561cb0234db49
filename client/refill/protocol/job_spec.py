"""What is a job? The settings that every pod and every rank of one training run must share."""

from __future__ import annotations

import dataclasses
import re
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from refill.errors import InvalidInput, JobConflict, JobLost
from refill.protocol.policies import terms_of
from refill.protocol.sizes import parse_bytes

MOST_URL_LETTERS = 2048
"""Of a dataset's URL."""
JOB_NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$"
_SHARDS = re.compile(r"\*|\{[^{}]*(\.\.|,)[^{}]*\}|\.tar$")
_LEFT_TO_PODS = ("chunk_size", "memory_bytes", *(f"policy_settings {name}" for name in ("plan_bytes", "shares", "run")))
"""Settings that the pods choose where a job has 0 there."""


def is_job_name(text: str) -> bool:
    return re.fullmatch(JOB_NAME, text) is not None


def check_is_folder(url: str) -> None:
    """Raises :class:`InvalidInput`, which names the folder, for shards as WebDataset is given them: a pattern, or one
    tar."""
    if not _SHARDS.search(url):
        return
    parts = url.split("/")
    first = next((number for number, part in enumerate(parts) if _SHARDS.search(part)), len(parts) - 1)
    folder = "/".join(parts[:first]) or "."
    raise InvalidInput(f"{url!r} names tars; give the folder that holds them: {folder}")


@dataclass(frozen=True)
class JobSpec:
    """Settings of one job; registering the same name again with other settings is refused.

    Raises :class:`InvalidInput` with one line that names the setting.
    """

    name: str
    """Of at most 128 letters, digits, ``.``, ``_`` and ``-``; the first is a letter or a digit."""
    dataset: str
    """URL of a dataset with an index, ``s3://bucket/prefix`` or ``file:///folder``."""
    world_size: int = 1
    """Number of ranks that share each epoch."""
    seed: int = 0
    read_seed: int | None = None
    """Of ``planned`` only: draws the order in which chunks are read, and ``seed`` all else. Jobs of a sweep, with other
    seeds and the same ``read_seed``, read the store about once together while they are near each other
    (docs/CLIENT.md). None: ``seed`` draws that, too, and the job reads alone."""
    shuffle: bool = True
    """False: samples come in the order of the dataset."""
    drop_last: bool = False
    """As in torch's DistributedSampler, where ``world_size`` does not divide the dataset: True drops the rest, False
    pads with repeated samples."""
    order: str = "keyed"
    """``keyed``: the order of each rank follows from the seed. ``explicit``: each rank posts the ids that it wants,
    in order, before each epoch (its trace); with ``planned`` each request names them, and they come in that order."""
    num_epochs: int = 0
    """How many epochs will be asked for; 0: not known. If it is known, pods load nothing ahead of the last epoch's end.
    A hint: the value of the first registration holds, and another value later is no conflict."""
    chunk_size: int = 0
    """K, the number of neighbouring samples that are read together. A smaller K shuffles better, a larger one needs
    fewer requests. 0: the pods choose. With ``planned`` it is the largest of 8, 16, 32 and 64, of small samples up to
    512, that trains no worse with the memory that there is, up to an eighth more where blobs would end in short chunks;
    with ``redox`` 64; with ``exact`` the smallest power of two from 8 to 64 that makes chunks of 512 KiB, fewer where
    that is over 16 MiB or leaves fewer than 2,048 chunks."""
    group_order: str = "consecutive"
    """Of live policies: which chunks are read, one after another, into the same part of memory (an abstract chunk,
    Brand 3.2): neighbours (``consecutive``), or chunks far apart (``interleaved``, which spreads samples less)."""
    policy: str = "planned"
    """How pods choose samples. ``planned``: in an order that is computed ahead from the seed, and that reads every byte
    once an epoch. ``exact``: keeps an order of your own by caches, and reads more for it. ``redox``: the papers'
    protocol. These two decide as they are asked and remember in memory: if a pod is restarted, the epoch begins
    anew."""
    refill: str = "best"
    """Of ``redox`` only: which chunk is read next. ``best``: the one that fills most slots, ties at random; ``random``:
    any (Brand 3.3)."""
    policy_settings: dict[str, Any] = field(default_factory=dict, hash=False)
    """Settings that only some policies have, by name, such as ``{"eviction": "renewal"}`` of ``exact``."""
    batch_group: int = 1
    """Of ``planned`` only: how many ranks share each batch, as in tensor, context or pipeline parallel training.
    ``CacheDataset`` takes a number or a dimension of a DeviceMesh. Each rank of a group gets the whole batch, which is
    read once."""
    prefetch_window: int = 10_000
    """Of live policies, P: how far ahead a pod looks for samples to send before a rank asks for them. It looks at this
    many of the rank's next requests to itself. 0: it sends nothing ahead."""
    memory_bytes: int = 0
    """Memory of the job on each pod, such as ``"4GiB"``, kept for it. 0: the jobs that run share what there is
    (docs/POD.md)."""
    holder: str = ""
    """Whose token the job was registered with. Pods fill it in, whatever a client says."""

    def __post_init__(self) -> None:
        self._check_types()
        if not is_job_name(self.name):
            raise InvalidInput(
                f"job name {self.name!r}: use 1 to 128 letters, digits, '.', '_' or '-', first a letter or digit"
            )
        if len(self.dataset) > MOST_URL_LETTERS:
            raise InvalidInput(
                f"job setting dataset has {len(self.dataset):,} letters, and a URL here at most {MOST_URL_LETTERS:,}: "
                f"{self.dataset[:80]!r}..."
            )
        if any(unicodedata.category(letter) in ("Cc", "Cs") for letter in self.dataset):
            raise InvalidInput(f"job setting dataset holds characters that no URL has: {self.dataset!r}")
        check_is_folder(self.dataset)
        for name, least, most in (
            ("world_size", 1, 2**20),
            ("batch_group", 1, 2**10),
            ("seed", -(2**63), 2**63 - 1),
            ("read_seed", -(2**63), 2**63 - 1),
            ("num_epochs", 0, 2**31),
            ("chunk_size", 0, 2**16),
            ("prefetch_window", 0, 2**16),
            ("memory_bytes", 0, 2**62),
        ):
            value = getattr(self, name)
            if value is not None and not least <= value <= most:
                raise InvalidInput(f"job setting {name} must be {least} to {most}, got {value}")
        for name, choices in (
            ("order", ("keyed", "explicit")),
            ("group_order", ("consecutive", "interleaved")),
            ("refill", ("best", "random")),
        ):
            if getattr(self, name) not in choices:
                raise InvalidInput(f"job setting {name} must be {' or '.join(choices)}, got {getattr(self, name)!r}")
        self._check_together()

    def _check_types(self) -> None:
        for setting in dataclasses.fields(self):
            value, may_be_none = getattr(self, setting.name), setting.default is None
            named = str(setting.type).removesuffix(" | None")
            wanted = {"str": str, "int": int, "bool": bool, "dict[str, Any]": dict}[named]
            is_right = isinstance(value, wanted) and not (wanted is int and isinstance(value, bool))
            if not is_right and not (value is None and may_be_none):
                what = "job name" if setting.name == "name" else f"job setting {setting.name}"
                raise InvalidInput(f"{what} must be {wanted.__name__}, got {value!r:.100}")

    def _check_together(self) -> None:
        self.settings_of_policy()
        if self.batch_group > 1 and not self.is_planned:
            raise InvalidInput("job setting batch_group goes with policy='planned'")
        if self.read_seed is not None and not (self.is_planned and self.shuffle and self.order == "keyed"):
            raise InvalidInput(
                "job setting read_seed goes with policy='planned', shuffle=True and whole datasets: parts, lists and "
                "classes are read in orders of their own"
            )
        if self.world_size % self.batch_group:
            raise InvalidInput(
                f"job setting batch_group={self.batch_group} does not divide world_size={self.world_size}: every group "
                "has as many ranks"
            )

    @property
    def is_planned(self) -> bool:
        """Whether its order is computed ahead, or ranks have it in lists."""
        return self.policy == "planned"

    @property
    def is_listed(self) -> bool:
        """Whether ranks ask for samples that they name, of policy ``planned``: its order is kept to the letter."""
        return self.policy == "planned" and self.order == "explicit"

    @property
    def num_groups(self) -> int:
        """Ranks that get batches of their own; of ranks that share a batch, groups of them."""
        return self.world_size // self.batch_group

    @property
    def is_by_importance(self) -> bool:
        """Whether epochs are drawn by what training finds important, as :class:`refill.ImportanceSampler` does."""
        return self.policy == "exact" and self.policy_settings.get("eviction") == "importance"

    def settings_of_policy(self) -> dict[str, Any]:
        """All settings of the policy's own; those that have a field here are taken from there. Raises
        :class:`InvalidInput`."""
        terms, fields = terms_of(self.policy), {setting.name for setting in dataclasses.fields(self)}
        if both := sorted(fields & set(self.policy_settings)):
            raise InvalidInput(f"{both[0]} is a job setting, not one of policy_settings")
        given = {setting.name: getattr(self, setting.name) for setting in terms.settings if setting.name in fields}
        return terms.settings_with(self.policy, given | self.policy_settings)

    @classmethod
    def from_dict(cls, given: dict[str, Any]) -> JobSpec:
        """Build from decoded JSON; unknown names are refused, so that a typo is not silently a default."""
        if not isinstance(given, dict):
            raise InvalidInput(f"job settings must be an object of names and values, got {str(given)[:100]!r}")
        known = {setting.name for setting in dataclasses.fields(cls)}
        if unknown := sorted(set(given) - known):
            there_are = ", ".join(sorted(known - {"name", "holder"}))  # not of those that anybody says among settings
            raise InvalidInput(f"unknown job setting {unknown[0]!r}; there are: {there_are}")
        if missing := [name for name in ("name", "dataset") if name not in given]:
            raise InvalidInput(f"job setting {missing[0]} is missing")
        sizes = _sizes_in(given)
        if isinstance(of_policy := given.get("policy_settings"), dict):
            sizes["policy_settings"] = of_policy | _sizes_in(of_policy)
        return cls(**(given | sizes))

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return dataclasses.asdict(self)

    def as_planned_in(self, known: dict[str, Any] | None) -> JobSpec:
        """With the settings of its plan that pods have chosen, as these settings of the same job have them, where this
        one leaves them open. Of a job whose order is not planned, or where nothing is known, the same."""
        if known is None or self.policy != "planned" or known.get("policy") != self.policy:
            return self
        chosen = known.get("policy_settings")
        given = {name: value for name, value in self.policy_settings.items() if value}
        return replace(self, policy_settings=chosen | given) if isinstance(chosen, dict) else self

    def lost(self, why: str, epoch: int = -1) -> JobLost:
        """The line that a training run ends with.

        :param why: ``pod 2 was restarted``, or what else shows that pods have forgotten the job.
        :param epoch: that begins anew; -1: it is not known here.
        """
        place = f" (set_epoch({epoch}))" if epoch >= 0 else ""
        return JobLost(
            f"job {self.name} is lost: {why}, and policy {self.policy} keeps who got what only in memory. The epoch "
            f"begins anew: start training again without a state, from the epoch's beginning{place}; policy planned "
            "survives this",
            job=self.name,
            why=why,
            epoch=epoch,
        )

    def check_same(self, other: JobSpec, **details: Any) -> None:
        """Raises :class:`JobConflict` where a client's settings are others than these, the job's."""
        if differences := self.differences(other):
            raise JobConflict(
                f"job {self.name} was registered before with other settings ({'; '.join(differences)}): use another "
                "name, or end that job first",
                differences=differences,
                **details,
            )

    def differences(self, other: JobSpec) -> list[str]:
        """The settings in which a client's differ from these, the job's. A text for each says whose value is which."""
        other = other.as_planned_in(self.to_dict())
        return [
            f"{name}: yours is {_shown(name, theirs)}, the job's {_shown(name, ours)}"
            for name, ours, theirs in _pairs(self, other)
            if ours != theirs and name not in ("num_epochs", "holder")
        ]


def _sizes_in(given: dict[str, Any]) -> dict[str, Any]:
    """Those that were written with a unit, as ``64MiB``."""
    found = {}
    for name, value in given.items():
        if name.endswith("_bytes") and isinstance(value, str):
            try:
                found[name] = parse_bytes(value)
            except ValueError as error:
                raise InvalidInput(f"job setting {name}: {error}") from None
    return found


def _pairs(one: JobSpec, other: JobSpec) -> Iterator[tuple[str, Any, Any]]:
    """Each setting's name and both values; those of the policy's own one by one, None where it was not given."""
    for name in (setting.name for setting in dataclasses.fields(JobSpec)):
        if name != "policy_settings":
            yield name, getattr(one, name), getattr(other, name)
    for name in sorted({*one.policy_settings, *other.policy_settings}):
        yield f"policy_settings {name}", one.policy_settings.get(name), other.policy_settings.get(name)


def _shown(name: str, value: Any) -> str:
    if value is None:
        return "not given"
    return "chosen by refill" if value == 0 and name in _LEFT_TO_PODS else repr(value)
