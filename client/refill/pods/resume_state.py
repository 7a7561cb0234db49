"""What must a checkpoint hold so that a rank goes on where its loop stood? Its place in an epoch, and of which job.

Where the order is planned, it holds the plan, whole: then pods need to know nothing. Else pods keep in memory which
sample answers which request, so a place is enough as long as they run: asked for the positions that follow, they give
the samples that the loop has not had, the same ones where a loader had fetched some ahead.
"""

from __future__ import annotations

import operator
import re
from dataclasses import asdict, dataclass
from typing import Any

from refill.errors import InvalidInput
from refill.protocol.job_spec import JobSpec
from refill.protocol.receipt_digest import DigestPart

_VERSION = 1
_DIGEST = re.compile("[0-9a-f]{32}")
_MADE_BY = "refill.timed(loader, dataset).state_dict()"


@dataclass(frozen=True)
class ResumeState:
    """One rank's place. A dict of plain values on disk, so that ``torch.load(weights_only=True)`` takes it."""

    job: str
    dataset: str
    incarnation: str
    """The registration of the job that gave the samples; another one gives others."""
    world_size: int
    rank: int
    epoch: int
    position: int
    """Positions of the epoch that the loop has consumed, from 0 on."""
    length: int
    """Positions of this rank in the epoch; 0 before a TraceSampler has listed them."""
    plan: dict[str, Any] | None = None
    """Of a job whose order is planned: the settings that it follows from (refill.protocol.plan_settings)."""
    start: int = 0
    """The position of the epoch's one order from which on it is dealt to these ranks."""
    batch: int = 1
    """How many positions of it were dealt to a rank together."""
    group: int = 1
    """How many ranks shared each batch."""
    digest: tuple[DigestPart, ...] = ()
    """Of a planned job: what loops have had of the epoch, as receipts count it."""
    digest_before: tuple[DigestPart, ...] = ()
    """And of the epoch before: who was killed a moment after its end may not have reported it."""
    listed: tuple[int, str] | None = None
    """Of a planned job whose ranks ask by lists of their own: how long this rank's is, and its digest."""
    sampler: Any = None
    """What a TraceSampler keeps of the sampler that it wraps."""

    @property
    def at_end(self) -> bool:
        return self.position == self.length > 0

    @property
    def next_place(self) -> tuple[int, int]:
        """The epoch and the position that come next."""
        return (self.epoch + 1, 0) if self.at_end else (self.epoch, self.position)

    @property
    def num_groups(self) -> int:
        """Ranks that had batches of their own."""
        return self.world_size // self.group

    @property
    def num_had(self) -> int:
        """Of a planned job: how many positions of the epoch's one order all ranks together have had, from 0 on."""
        return self.start + self.position * self.num_groups

    @property
    def mid_epoch(self) -> bool:
        """Whether going on takes pods that know what they gave before."""
        return 0 < self.position < self.length

    def check_is_of(self, job: str, dataset: str) -> None:
        """Raises :class:`InvalidInput` for the state of another job, or of another dataset. A plan names its dataset by
        fingerprint, wherever that lies, and pods compare it."""
        for what, saved, here in (("job", self.job, job), ("dataset", self.dataset, dataset)):
            if saved != here and not (what == "dataset" and self.plan is not None):
                raise InvalidInput(
                    f"the state is of {what} {saved!r}, not {here!r}: another {what} starts its epochs anew, without it"
                )

    def check_num_ranks(self, spec: JobSpec) -> None:
        """Raises :class:`InvalidInput` for a state of another number of ranks than this job has, whose order is not
        planned."""
        if self.world_size != spec.world_size:
            raise InvalidInput(
                f"the state was saved with world_size {self.world_size}, and this job has {spec.world_size}: with "
                f"policy {spec.policy} that begins the epoch anew: end the job (refill end {self.job}), and call "
                f"set_epoch({self.next_place[0]}) in place of loading the state. Policy planned goes on"
            )

    def to_dict(self) -> dict[str, Any]:
        found = {"version": _VERSION} | asdict(self)
        found["digest"] = [part.to_list() for part in self.digest] or None
        found["digest_before"] = [part.to_list() for part in self.digest_before] or None
        found["listed"] = list(self.listed) if self.listed else None
        for name in ("sampler", "plan", "digest", "digest_before", "listed"):
            if found[name] is None:
                del found[name]
        if self.plan is None:
            del found["start"], found["batch"], found["group"]
        return found

    @classmethod
    def from_dict(cls, state: Any) -> ResumeState:
        """Raises :class:`InvalidInput` for what is no state."""
        if not isinstance(state, dict):
            raise InvalidInput(f"a state is a dict as {_MADE_BY} makes it, got {type(state).__name__}")
        if "_snapshot" in state or "_sampler_iter_state" in state:
            raise InvalidInput("this state is of torchdata's StatefulDataLoader: load it there")
        if "version" not in state:
            raise InvalidInput(f"a state is a dict as {_MADE_BY} makes it, this one has no 'version'")
        if state["version"] != _VERSION:
            raise InvalidInput(f"the state has version {state['version']!r}, and this refill reads version {_VERSION}")
        found = cls(
            job=_text(state, "job"),
            dataset=_text(state, "dataset"),
            incarnation=_text(state, "incarnation"),
            world_size=_count(state, "world_size"),
            rank=_count(state, "rank"),
            epoch=_count(state, "epoch"),
            position=_count(state, "position"),
            length=_count(state, "length"),
            plan=state.get("plan"),
            start=_count({"start": 0} | state, "start"),
            batch=max(1, _count({"batch": 1} | state, "batch")),
            group=max(1, _count({"group": 1} | state, "group")),
            digest=_digest(state.get("digest")),
            digest_before=_digest(state.get("digest_before")),
            listed=_listed(state.get("listed")),
            sampler=state.get("sampler"),
        )
        if found.position > found.length:
            raise InvalidInput(
                f"the state is damaged: position {found.position} is past the end of epoch {found.epoch}, which has "
                f"{found.length} positions for rank {found.rank}"
            )
        return found


def _digest(said: Any) -> tuple[DigestPart, ...]:
    if said is not None and not isinstance(said, list):
        raise InvalidInput(f"the state is damaged: digest must be a list, got {said!r:.50}")
    return tuple(DigestPart.from_list(each) for each in said or ())


def _listed(said: Any) -> tuple[int, str] | None:
    if said is None:
        return None
    if not isinstance(said, (list, tuple)) or len(said) != 2 or not _DIGEST.fullmatch(str(said[1])):
        raise InvalidInput(f"the state is damaged: listed must be a length and a digest, got {said!r:.80}")
    return _count({"listed": said[0]}, "listed"), str(said[1])


def _text(state: dict[str, Any], name: str) -> str:
    value = state.get(name)
    if not isinstance(value, str):
        raise InvalidInput(f"the state is damaged: {name} must be a text, got {value!r:.50}")
    return value


def _count(state: dict[str, Any], name: str) -> int:
    value = state.get(name)
    try:
        number = -1 if isinstance(value, bool) else operator.index(value)  # type: ignore[arg-type]  # refused below
    except TypeError:
        number = -1
    if not 0 <= number < 2**62:
        raise InvalidInput(f"the state is damaged: {name} must be a number of at least 0, got {value!r:.50}")
    return number
