"""How do all pods open the dataset of a new job at once? Each begins as soon as it hears of the job.

Registration goes from pod to pod, since one of them names the incarnation. Opening a dataset takes round trips to the
store and depends on nothing that other pods say, so it need not wait for its turn.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from typing import Any

from refill.errors import RefillError
from refill_service.cache_core.record_pieces import holds_all
from refill_service.datasets.dataset_reader import Dataset

_KEPT_SECONDS = 5
"""Once it is open, and what is loaded ahead is here: for registrations that never come. Short: a dataset may be made
anew meanwhile."""


class EarlyOpening:
    """Datasets that are being opened, by URL. Close it when done.

    :param open_dataset: opens the newest version of a dataset, or the one with a fingerprint; called once for each that
        is begun.
    """

    def __init__(self, open_dataset: Callable[[str, str], Awaitable[Dataset]]) -> None:
        self._open_dataset = open_dataset
        self._begun: dict[str, asyncio.Task[Dataset]] = {}
        self._waiting: set[str] = set()
        self._forgetting: set[asyncio.Task[None]] = set()

    def begin(self, url: str, *, whole: bool = False) -> None:
        """Fact: a job with this dataset is about to be registered.

        :param whole: each pod will want the records of all samples, unless there are very many.
        """
        if url not in self._begun:
            self._begun[url] = asyncio.ensure_future(self._open(url, whole=whole))
            self._later(self._forget_later(url, self._begun[url]))

    def _later(self, forget: Coroutine[Any, Any, None]) -> None:
        forgetting = asyncio.create_task(forget)
        self._forgetting.add(forgetting)
        forgetting.add_done_callback(self._forgetting.discard)

    async def take(self, url: str, version: str = "") -> Dataset:
        """The dataset, from now on the caller's. Raises as :meth:`Dataset.open` does.

        :param version: as of :meth:`Dataset.open`.
        """
        newest = await self._take(url)
        if not version or newest.version == version:
            return newest
        await newest.close()
        return await self._open_dataset(url, version)

    async def _take(self, url: str) -> Dataset:
        while True:
            self.begin(url)
            opened = self._begun[url]
            self._waiting.add(url)
            try:
                dataset = await asyncio.shield(opened)
            except asyncio.CancelledError:
                is_open = opened.done() and not opened.cancelled() and opened.exception() is None
                if is_open and self._begun.get(url) is opened:
                    self._later(opened.result().close())  # both at once: nobody else would close it
                raise
            finally:
                self._waiting.discard(url)
                is_ours = self._begun.get(url) is opened
                if is_ours and opened.done():
                    del self._begun[url]
            if is_ours:  # else another job has taken it, of the other kind, which is registered at the same time
                return dataset

    async def dataset(self, url: str) -> Dataset:
        """One that stays here, for a job that may follow. Raises as :meth:`Dataset.open` does."""
        self.begin(url)
        opened = self._begun[url]
        try:
            return await asyncio.shield(opened)
        except RefillError:
            if self._begun.get(url) is opened and url not in self._waiting:
                del self._begun[url]  # whoever asks next looks anew
            raise

    async def close(self) -> None:
        for task in self._forgetting:
            task.cancel()
        await asyncio.gather(*self._forgetting, return_exceptions=True)
        for url in list(self._begun):
            self._begun[url].cancel()
            await self._forget(url)

    async def _open(self, url: str, *, whole: bool) -> Dataset:
        dataset = await self._open_dataset(url, "")
        if whole and holds_all(dataset.num_samples, is_listed=False):
            dataset.load_ahead()
        return dataset

    async def _forget_later(self, url: str, task: asyncio.Task[Dataset]) -> None:
        await asyncio.wait([task])
        if not task.cancelled() and task.exception() is None:
            await task.result().loaded_ahead()
        await asyncio.sleep(_KEPT_SECONDS)
        if self._begun.get(url) is task and url not in self._waiting:
            await self._forget(url)

    async def _forget(self, url: str) -> None:
        with suppress(RefillError, asyncio.CancelledError):
            dataset = await self._begun.pop(url)
            await dataset.close()
