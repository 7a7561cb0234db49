"""What a pod remembers of samples whose index has no checksums."""

from __future__ import annotations

from refill_service.datasets.first_checksums import _BLOCK_SAMPLES, _UNUSED_BYTES, FirstChecksums


def test_what_came_first_is_right_for_all_who_read_the_same() -> None:
    known = FirstChecksums()
    one, other = known.lease("a"), known.lease("a")
    assert one is other
    assert one.is_as_before(5, 7)
    assert other.is_as_before(5, 7)
    assert not other.is_as_before(5, 8)
    assert one.is_as_before(6, 0)
    assert one.is_as_before(6, 0)
    assert known.lease("b").is_as_before(5, 8)


def test_it_is_known_when_a_job_has_ended_and_another_begins() -> None:
    known = FirstChecksums()
    first = known.lease("a")
    first.is_as_before(5, 7)
    known.release(first)
    assert not known.lease("a").is_as_before(5, 8)


def test_memory_is_bounded_by_what_is_unused() -> None:
    known = FirstChecksums()
    used = known.lease("used")
    for name in ("old", "new"):
        found = known.lease(name)
        for sample in range(0, _UNUSED_BYTES // 8, _BLOCK_SAMPLES):
            found.is_as_before(sample, 1)
            used.is_as_before(sample, 1)
        known.release(found)
    assert not known.lease("new").is_as_before(0, 2)
    assert known.lease("old").is_as_before(0, 2), "the one longest unused was forgotten"
    assert not used.is_as_before(0, 2)
