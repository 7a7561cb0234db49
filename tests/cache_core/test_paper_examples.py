"""The papers' own examples, step by step, on the core that serves requests.

Each example has one abstract chunk of an owner and the traces of the requesters; a trace names, for each request,
the slot that it maps to, as the figures do. Distinct samples for equal slots come from the chunks of the group.
"""

from __future__ import annotations

import random

import numpy as np

from refill_service.cache_core.epoch_order import ExplicitTraces
from refill_service.cache_core.home_machine import RemoteMemory
from refill_service.cache_core.policies.interface import EpochBegan
from refill_service.cache_core.policies.redox import AbstractMemory, RedoxPolicy, choose_best, choose_random
from refill_service.cache_core.sample_mapping import AbstractMapping, ChunkLayout


def one_abstract_chunk(num_chunks: int, chunk_size: int) -> AbstractMapping:
    layout = ChunkLayout(np.array([0, num_chunks * chunk_size]), chunk_size)
    return AbstractMapping(layout.share(0, 1), num_abstract_chunks=1)


def trace_of_slots(slots: list[int], chunk_size: int) -> np.ndarray:
    """A trace whose requests map to these slots: the n-th request for a slot asks for chunk n's sample there."""
    asked, seen = [], dict.fromkeys(range(chunk_size), 0)
    for slot in slots:
        asked.append(seen[slot] * chunk_size + slot)
        seen[slot] += 1
    return np.array(asked, dtype=np.int64)


class FigureTraces(ExplicitTraces):
    """The requests that a figure shows, of an epoch that asks for every sample."""

    def members(self, first: int, end: int) -> None:
        return None


class Requester:
    """A rank that asks the owner for one position at a time, when it does not hold the answer already."""

    def __init__(self, owner: RedoxPolicy, trace: np.ndarray, room: int = 100) -> None:
        self.owner, self.trace = owner, trace
        self.memory: RemoteMemory[int] = RemoteMemory(room)
        self.got: list[int] = []

    def ask(self, position: int) -> list[int] | None:
        """Positions that the owner sent ahead; None when the request was answered from remote memory."""
        held = self.memory.take((0, 0, position))
        if held is not None:
            self.got.append(held)
            return None
        asked = self.trace[position : position + 1]
        taken = self.owner.requested(0, asked)
        for read in taken.orders.reads:
            self.owner.arrived(read)
        self.got.append(int(taken.samples[0]))
        room = self.memory.grant()
        ahead = self.owner.send_ahead(0, asked, position + 1, room, started_below=position + 1)
        entries = zip(ahead.positions.tolist(), ahead.samples.tolist(), strict=True)
        self.memory.settle(room, [((0, 0, p), 1, s) for p, s in entries])
        return ahead.positions.tolist()


def owner_of(mapping: AbstractMapping, trace: np.ndarray, window: int) -> RedoxPolicy:
    traces = FigureTraces(mapping.share.num_samples, {0: trace})
    lengths, settings = np.ones(mapping.share.num_samples, dtype=np.int64), {"refill": "best"}
    return RedoxPolicy(EpochBegan(mapping, traces, lengths, prefetch_window=window, settings=settings))


def test_redox_3_7_overlapping_windows() -> None:
    """Redox 3.7, Figure 1 (d, e): requests 10, 12, 15, 16, 17, 19, 20 of node 0 on node 1, at slots 3, 0, 3, 3, 1, ...

    The demand for read 10 sends 12 and 17 ahead (15 and 16 map to the slot of read 10). After the demand for 15,
    16 conflicts with it, 17 is there already, and 19 and 20 go.
    """
    reads = [10, 12, 15, 16, 17, 19, 20]
    trace = trace_of_slots([3, 0, 3, 3, 1, 0, 2], chunk_size=4)
    node0 = Requester(owner_of(one_abstract_chunk(4, 4), trace, window=4), trace)

    assert [reads[p] for p in node0.ask(0) or []] == [12, 17]
    assert node0.ask(1) is None, "read 12 was sent ahead with read 10"
    assert [reads[p] for p in node0.ask(2) or []] == [19, 20]
    assert node0.ask(3) is not None, "read 16 conflicted twice, so it needs a request of its own"
    assert [node0.ask(p) for p in (4, 5, 6)] == [None, None, None]
    assert len(set(node0.got)) == len(reads), "a sample was delivered twice"


def test_redox_3_6_second_window_remembers_the_first() -> None:
    """Redox 3.6: window 1 is [(a), b, c, c', d] and sends c and d; window 2 is [(b), c, c', d, c''] and sends nothing:
    c and d were sent before, c' and c'' conflict with c, which is not consumed."""
    a, b, c, d = 0, 1, 2, 3
    trace = trace_of_slots([a, b, c, c, d, c], chunk_size=4)
    mapping = one_abstract_chunk(4, 4)
    owner = owner_of(mapping, trace, window=4)
    # b's slot is empty when a is asked for, as the example has it: another rank has taken what was there.
    refill = owner.memory.take_one(b)[1]
    assert refill is not None
    owner.arrived(refill)
    node = Requester(owner, trace)

    assert node.ask(0) == [2, 4]
    assert node.ask(1) == []
    assert node.ask(2) is None
    assert node.ask(3) is not None, "c' conflicted with c, so it needs a request of its own"


def test_brand_3_3_refill_choice() -> None:
    """Brand 3.3: one of three slots is valid; chunk 1 could fill one slot (its other sample is consumed), chunk 2 both.

    `best` takes chunk 2 at a fill rate of 2/3, not chunk 1 at 1/3."""
    fillable = np.array([[False, False, False], [False, True, False], [False, True, True]])
    assert choose_best(fillable, 1, random.Random(0)) == 2
    assert fillable[2].sum() / 3 == 2 / 3
    assert fillable[1].sum() / 3 == 1 / 3
    assert {choose_random(fillable, 1, random.Random(seed)) for seed in range(20)} == {1, 2}


def test_brand_figure_4_redirect_and_self_invalidate() -> None:
    """Brand 3.3, Figure 4: a request is answered with the sample in its slot, whichever chunk that came from, once."""
    mapping = one_abstract_chunk(3, 3)
    memory = AbstractMemory(mapping, choose_best, random.Random(1))
    first, refill = memory.take_one(1)
    assert refill is not None
    assert refill.samples.tolist() == [3 * refill.chunk + slot for slot in range(3)], "an empty one fills whole"
    assert first == 3 * refill.chunk + 1
    second, none = memory.take_one(2)
    assert none is None, "the slot was valid: no read"
    assert second == 3 * refill.chunk + 2
    third, refill = memory.take_one(1)
    assert refill is not None, "the slot was invalidated when it was taken"
    assert refill.samples.tolist() == [3 * refill.chunk + 1, 3 * refill.chunk + 2], "slot 0 is valid and never evicted"
    assert third == 3 * refill.chunk + 1


def test_brand_figure_6_prefetch_check() -> None:
    """Brand 3.4, Figure 6: requests at M3, M4, M5, M5, M3, with M4 empty on the owner when the first comes.

    The first answer brings the third ahead (M5), not the second (M4 is empty) nor the fourth and fifth (same slots).
    The second is a miss on an empty abstract chunk; its answer brings the fifth (M3), not the fourth (M5 is held).
    The third is a hit, the fourth a request with nothing ahead, the fifth a hit.
    """
    m3, m4, m5 = 0, 1, 2
    trace = trace_of_slots([m3, m4, m5, m5, m3], chunk_size=3)
    owner = owner_of(one_abstract_chunk(3, 3), trace, window=4)
    refill = owner.memory.take_one(m4)[1]  # leaves M3 and M5 valid, M4 empty
    assert refill is not None
    owner.arrived(refill)
    node0 = Requester(owner, trace)

    assert node0.ask(0) == [2]
    assert not (~owner.memory.slots >= 0).any(), "the owner has given all that it had"
    misses = owner.counts.misses
    assert node0.ask(1) == [4]
    assert owner.counts.misses == misses + 1, "the second request reads a chunk"
    assert node0.ask(2) is None
    assert node0.ask(3) == []
    assert node0.ask(4) is None


def test_brand_figure_7_prefetch_raises_the_fill_rate() -> None:
    """Brand 3.4, Figure 7: after a request alone, two slots can be filled (67 %); with one sample sent ahead, three."""
    for window, filled in ((0, 2), (1, 3)):
        trace = trace_of_slots([0, 1, 0], chunk_size=3)
        owner = owner_of(one_abstract_chunk(2, 3), trace, window)
        refill = owner.memory.take_one(2)[1]  # leaves slots 0 and 1
        assert refill is not None
        owner.arrived(refill)
        Requester(owner, trace).ask(0)
        next_refill = owner.memory.take_one(0)[1]
        assert next_refill is not None
        assert len(next_refill.samples) == filled, f"window {window}"
