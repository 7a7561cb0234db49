"""What nobody can know stays unknown until its epochs are over."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from refill.protocol.records import Kind, RecordReader, encode_records
from refill_service.cache_core.recollection import Recollection
from refill_service.cache_core.unknown_deliveries import UnknownDeliveries


def after_a_restart(before: UnknownDeliveries) -> UnknownDeliveries:
    """From what was written down."""
    recollection, after = Recollection(), UnknownDeliveries()
    recollection.add(RecordReader(encode_records(before.records())), source=0)
    recollection.table_is_whole = True
    after.restored(recollection.known_from, (), recollection.newest_entered)
    return after


def test_a_rank_that_was_gone_on_without_may_have_been_an_epoch_ahead() -> None:
    unknown = UnknownDeliveries()
    unknown.restored({}, without=[1], newest=3)
    assert [unknown.ranks(epoch) for epoch in (3, 4, 5)] == [frozenset({1}), frozenset({1}), frozenset()]
    assert [unknown.ranks_that_had_come(epoch) for epoch in (3, 4)] == [frozenset({1}), frozenset()]


def test_when_no_epoch_is_known_it_is_the_first_that_opens() -> None:
    unknown = UnknownDeliveries()
    unknown.restored({}, without=[0, 1], newest=-1)
    assert unknown.ranks(7) == unknown.ranks_that_had_come(7) == {0, 1}
    assert [(each.kind, each.epoch, each.rank) for each in unknown.epoch_opens(2)] == [
        (Kind.UNKNOWN, 4, 0),
        (Kind.UNKNOWN, 4, 1),
    ]
    assert unknown.ranks(3) == {0, 1}
    assert not unknown.ranks(4)
    assert unknown.epoch_opens(3) == []


@given(
    st.lists(
        st.tuples(
            st.dictionaries(st.integers(0, 3), st.integers(0, 8), max_size=3),
            st.sets(st.integers(0, 3), max_size=2),
            st.integers(-1, 6),
            st.integers(0, 6),
        ),
        max_size=6,
    )
)
def test_no_restart_makes_known_what_was_unknown(losses: list[tuple[dict[int, int], set[int], int, int]]) -> None:
    unknown = UnknownDeliveries()
    for known_from, without, newest, opened in losses:
        before = [unknown.ranks(epoch) for epoch in range(12)]
        unknown.restored(known_from, without, newest)
        unknown.epoch_opens(max(opened, newest))
        unknown = after_a_restart(unknown)
        for epoch, ranks in enumerate(before):
            assert ranks <= unknown.ranks(epoch)
        for rank in without:
            assert rank in unknown.ranks(max(newest, 0)), "nobody knows what it received"
