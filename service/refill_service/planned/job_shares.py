"""Which shares of a planned job are served at this pod, and with what memory?

Its own, and while another pod is away those in which this one stands in for it. Each is made when it is first asked
for. Where a pod is back, nobody asks for its shares here any more, and they are let go of.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import numpy as np

from refill.errors import RefillError
from refill.protocol.share_owners import share_owners, stand_in
from refill.protocol.wire_format import Int64Array
from refill_service.cache_core.planned.job_orders import JobOrders
from refill_service.cache_core.planned.posted_lists import PostedLists
from refill_service.cache_core.planned.share_memory import ShareMemory
from refill_service.cache_core.planned.shared_chunks import SharedChunks
from refill_service.cache_core.planned.shares import Share
from refill_service.jobs.chunk_reader import ChunkReader
from refill_service.jobs.running_epoch import OwnerCounts
from refill_service.jobs.single_reads import Reading, SingleReads
from refill_service.memory.byte_gate import ByteGate
from refill_service.memory.payload import Payload, RecentlySent
from refill_service.memory.pinned_tier import PinnedShare
from refill_service.planned.job_records import JobRecords
from refill_service.planned.pods_away import PodsAway
from refill_service.planned.share_reads import HeldBack
from refill_service.planned.share_server import ShareServer
from refill_service.planned.shared_reads import SharedReads
from refill_service.settings import Settings

_STANDS_IN_SECONDS = 10.0
"""A share of another pod that nobody has asked for here for so long is let go of. Before it was served for so long, it
has half of the memory: its pod may be back in a moment, and then what was read ahead was read in vain."""


class JobShares:
    """Those of one planned job that are served at this pod.

    :param job: whose they are; ``orders`` are those of its plan.
    :param records: of samples, by share.
    :param single: reads samples one by one.
    :param recent: what has just left, of all shares.
    :param counts_of: those of an epoch.
    :param lists: that ranks will post; None: the order is that of the plan.
    :param shared: by share, what jobs that read its chunks in this order read for each other; None: it reads alone.
    """

    def __init__(
        self,
        job: Reading,
        orders: JobOrders,
        records: JobRecords,
        *,
        settings: Settings,
        gate: ByteGate,
        pinned: PinnedShare,
        away: PodsAway,
        single: SingleReads,
        recent: RecentlySent,
        counts_of: Callable[[int], OwnerCounts],
        lists: PostedLists | None,
        shared: Callable[[int], SharedChunks[Payload]] | None,
    ) -> None:
        self.owners = share_owners(orders.settings.num_shares, settings.num_pods)
        """``(shares,)`` the pod of each."""
        self.own: list[int] = np.flatnonzero(self.owners == settings.ordinal).tolist()
        self.num_own_samples = int(orders.shares.sizes[self.own].sum())
        self.own_planned_bytes = max(1, sum(map(orders.planned_bytes, self.own)))
        """Memory that their orders are planned for."""
        self.num_epochs = 0
        """That will be asked for; 0: not known."""
        self.num_askers = self.num_ranks = 1
        """How many ask for each sample, and how many ask."""
        self._job, self._orders, self._records = job, orders, records
        self._settings, self._gate, self._pinned, self._away = settings, gate, pinned, away
        self._single, self._recent, self._counts_of = single, recent, counts_of
        self._lists, self._shared = lists, shared
        self._chunks = ChunkReader(job.dataset, records.own, job.share, gate, pinned, job.asker)
        self._capacity_bytes = self._kept_bytes = 0
        self._servers: dict[int, ShareServer] = {}
        self._left: list[ShareServer] = []
        """Of shares that were let go of, those that have reads under way."""
        self._stands_in_since: dict[int, float] = {}
        """Shares of other pods that are served here."""
        self._stands_in_for_long: set[int] = set()
        self._planning, self._making, self._held_back = asyncio.Lock(), asyncio.Lock(), HeldBack()
        self._warming: dict[tuple[int, int, int], asyncio.Task[None]] = {}
        """By share, epoch and position."""
        self._over: RefillError | None = None
        """Why nobody is answered any more."""

    # Which pod serves a share.

    def pods_of(self, shares: Int64Array) -> Int64Array:
        """Of ``(n,)`` shares, now."""
        owners = self.owners[shares]
        if self._away.away:
            for place in np.flatnonzero(np.isin(owners, list(self._away.away))).tolist():
                owners[place] = self._pod_of(int(shares[place]))
        return owners

    def _pod_of(self, share: int) -> int:
        owner, away = int(self.owners[share]), self._away.away
        return owner if owner not in away else stand_in(share, len(self.owners), self._settings.num_pods, away)

    def at_hand(self, number: int) -> ShareServer | None:
        """One that this pod serves now, if it was asked for before."""
        return self._servers.get(number) if self._pod_of(number) == self._settings.ordinal else None

    def made(self, number: int) -> ShareServer | None:
        """The same, whichever pod ought to serve it."""
        return self._servers.get(number)

    async def server(self, number: int) -> ShareServer:
        """Made when it is first asked for, by a thread."""
        if number not in self._servers:
            async with self._making:
                if number not in self._servers and self._over is None:
                    await self._records.hold(number)
                    share = await asyncio.to_thread(self._orders.share, number)
                    memory = await asyncio.to_thread(self._memory_of, number, *share)
                    if self._over is None:
                        self._servers[number] = self._server_of(number, *share, memory)
                        if number not in self.own:
                            self._stands_in_since[number] = time.monotonic()
                        self._share_memory()
        if self._over is not None:
            raise self._over
        return self._servers[number]

    def _memory_of(self, number: int, share: Share, lengths: Int64Array) -> ShareMemory:
        planned_bytes = self._orders.planned_bytes(number)
        are_means = self._job.dataset.has_means
        memory = ShareMemory(share.starts, lengths, planned_bytes, self.num_askers, are_means=are_means)
        memory.most_at_first_bytes, memory.num_ranks = self._chunks.limit_bytes, self.num_ranks
        return memory

    def _server_of(self, number: int, share: Share, lengths: Int64Array, memory: ShareMemory) -> ShareServer:
        chunks = self._reader_of(number)
        return ShareServer(
            self._orders,
            number,
            share,
            lengths,
            memory,
            chunks,
            self._single,
            self._recent,
            self._counts_of,
            name=self._job.asker.job,
            wait_seconds=self._settings.wait_seconds,
            num_epochs=self.num_epochs,
            lists=self._lists,
            planning=self._planning,
            held_back=self._held_back,
            shared=None if self._shared is None else SharedReads(self._shared(number), memory, lengths, chunks),
        )

    def _reader_of(self, number: int) -> ChunkReader:
        records = self._records.of_share(number)
        if records is self._chunks.records:
            return self._chunks
        return ChunkReader(self._job.dataset, records, self._job.share, self._gate, self._pinned, self._job.asker)

    def look_at_others(self) -> None:
        """Shares of other pods: those that answer again are let go of."""
        now = time.monotonic()
        servers = {n: self._servers[n] for n in self._stands_in_since}
        over = {n for n, of in servers.items() if not of.num_asking and now - of.last_asked > _STANDS_IN_SECONDS}
        for number in over:
            self._forget(number)
        for_long = {n for n, since in self._stands_in_since.items() if now - since > _STANDS_IN_SECONDS}
        if over or for_long != self._stands_in_for_long:
            self._stands_in_for_long = for_long
            self._share_memory()

    # What they hold.

    @property
    def resident_bytes(self) -> int:
        return sum(server.resident_bytes for server in self._servers.values())

    @property
    def kept_bytes(self) -> int:
        """For other jobs."""
        return sum(server.kept_bytes for server in self._servers.values())

    @property
    def held_bytes(self) -> int:
        """Of samples in memory or on their way."""
        return sum(server.memory.held_bytes for server in self._servers.values())

    def are_served(self) -> bool:
        """Whether any is. It is asked every second, and forgets those that were let go of and have ended."""
        self._left = [each for each in self._left if each.is_reading]
        return bool(self._servers)

    def memory_is(self, capacity_bytes: int, kept_bytes: int) -> None:
        """Fact: all together may take so much memory; and what they keep for other jobs."""
        self._capacity_bytes, self._kept_bytes = capacity_bytes, kept_bytes
        self._share_memory()

    def _share_memory(self) -> None:
        """By what each is planned for. Of those of this pod, all have their part from the beginning; others are here
        while their pods are away."""
        wanted = {
            number: self._orders.planned_bytes(number) // (2 if self._may_be_back(number) else 1)
            for number in self._servers
        }
        of_others = sum(bytes_ for number, bytes_ in wanted.items() if number in self._stands_in_since)
        of_all = self.own_planned_bytes + of_others
        for number, server in self._servers.items():
            server.memory_is(
                self._capacity_bytes * wanted[number] // of_all, self._kept_bytes * wanted[number] // of_all
            )

    def _may_be_back(self, number: int) -> bool:
        """Whether the pod of a share that is served here was away for a short time only, as far as can be seen."""
        return number in self._stands_in_since and number not in self._stands_in_for_long

    def give_back(self) -> None:
        """Fact: others wait for what they hold beyond their memory."""
        for server in self._servers.values():
            server.gives_back()

    def ranks_are(self, num_askers: int, num_ranks: int, num_epochs: int) -> None:
        """Fact: so many ask for each sample from now on, and so many ask."""
        self.num_askers, self.num_ranks, self.num_epochs = num_askers, num_ranks, num_epochs
        for server in self._servers.values():
            server.memory.num_askers, server.memory.num_ranks = num_askers, num_ranks

    async def lists_are_known(self, epoch: int) -> None:
        """Fact: more is known of the lists of an epoch."""
        for number in self.own:
            if self._orders.shares.sizes[number]:
                (await self.server(number)).lists_are_known(epoch)

    def warm(self, epoch: int, position: int) -> dict[str, int]:
        """Have the shares of this pod read what an epoch begins with, or goes on with from a position on. Returns what
        is in memory by now, and what will be."""
        shares = [share for share in self.own if self._orders.shares.sizes[share]]
        if any((share, epoch, position) not in self._warming for share in shares):
            for task in self._warming.values():
                task.cancel()
            self._warming = {
                (share, epoch, position): asyncio.create_task(self._warm(share, epoch, position)) for share in shares
            }
        planning = sum(not task.done() for task in self._warming.values())
        if not planning:
            for task in self._warming.values():
                task.result()
        return {"is_planning": planning, "in_memory_bytes": self.resident_bytes, "wanted_bytes": self.held_bytes}

    async def _warm(self, number: int, epoch: int, position: int) -> None:
        place = self._orders.first_place(epoch, number, position)
        await (await self.server(number)).warm(epoch, place)

    # How they end.

    def forget(self) -> None:
        """Forget the bytes of what nobody has asked for, and the orders: should somebody do so all the same, it is read
        again."""
        for number in list(self._servers):
            self._forget(number)
        self._warming.clear()

    def _forget(self, number: int) -> None:
        """What somebody waits for of it comes all the same."""
        server = self._servers.pop(number)
        server.forget()
        self._left.append(server)
        if self._stands_in_since.pop(number, None) is not None:
            self._records.forget(number)

    async def close(self, why: RefillError) -> None:
        """Requests under way end with this error, and so do those that come late."""
        self._over = why
        for task in self._warming.values():
            task.cancel()
        servers, self._servers = self._servers, {}
        self._stands_in_since.clear()
        await asyncio.gather(*(server.close(why) for server in (*servers.values(), *self._left)))
        await asyncio.to_thread(servers.clear)  # a thread gives their tables back: gigabytes take a while
