"""How do all pods of a job learn that nobody asks for it any more? The homes of its ranks tell the others.

Nothing hangs on it but whose memory is taken first: a pod that is told too early, or not at all, answers all the same.
"""

from __future__ import annotations

import asyncio
import contextlib

from refill.errors import UnknownJob
from refill.protocol.rank_life import RankLife
from refill_service.jobs.job_table import JobTable
from refill_service.jobs.job_use import JobUse
from refill_service.peers.peers import Peers

__all__ = ["Goodbyes"]

_TELL_SECONDS = 0.5
"""A process that ends waits for this."""


class Goodbyes:
    """Tells all pods of a job, of either kind, that nobody asks for it any more."""

    def __init__(self, table: JobTable, peers: Peers) -> None:
        self._table = table
        self._peers = peers
        self._telling: dict[str, asyncio.Task[None]] = {}
        table.was_left = self._was_left

    async def said(self, name: str, rank: int, life: RankLife) -> None:
        """Fact: a training process that was a rank ends. Raises :class:`UnknownJob`. Other pods know it, too, when this
        returns, as far as they answer at once."""
        self._use(name).said_goodbye(rank, life)
        self._table.share_memory()
        if (telling := self._telling.get(name)) is not None:
            await asyncio.shield(telling)

    def pod_said(self, name: str, pod: int) -> None:
        """Fact: no rank whose home is another pod asks for the job any more. Raises :class:`UnknownJob`."""
        self._use(name).pod_said_goodbye(pod)
        self._table.share_memory()

    async def close(self) -> None:
        for task in self._telling.values():
            task.cancel()
        await asyncio.gather(*self._telling.values(), return_exceptions=True)

    def _was_left(self, name: str) -> None:
        if name not in self._telling:
            task = self._telling[name] = asyncio.create_task(self._tell(name))
            task.add_done_callback(lambda _: self._telling.pop(name, None))

    async def _tell(self, name: str) -> None:
        settings = self._table.settings
        path = f"/peer/v1/jobs/{name}/goodbye?pod={settings.ordinal}"
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_TELL_SECONDS):
                calls = (self._peers.call(pod, "POST", path) for pod in settings.other_pods)
                await asyncio.gather(*calls, return_exceptions=True)

    def _use(self, name: str) -> JobUse:
        at_pod = self._table.jobs.get(name) or self._table.planned.get(name)
        if at_pod is None:
            raise UnknownJob(f"pod {self._table.settings.ordinal} knows no job {name}", job=name)
        return at_pod.use
