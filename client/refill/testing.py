"""Real pods on this machine, for tests of training code, which end with the test; and some of them before.

    def test_training_goes_on_without_a_pod(tmp_path):
        dataset = testing.packed("images", tmp_path / "dataset")
        with testing.Pods(3) as pods:
            train(pods.url, dataset, job="run-1", after_a_step=lambda: pods.kill(1))
            pods.check_exact("run-1", epoch=0)

It needs the service, too: pip install 'refill-cache[service]'.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.parse import quote

from refill.errors import InvalidInput, UnknownJob
from refill.loops.epoch_place import checked_epoch
from refill.pods.credentials import Credentials
from refill.pods.pod_channel import PodChannel, Wait

try:
    from refill_service.datasets.pack import pack
    from refill_service.demo.local_cluster import LocalCluster
    from refill_service.settings import load_settings
except ModuleNotFoundError as error:
    if (error.name or "").partition(".")[0] in ("refill", "refill_service"):
        raise
    raise ModuleNotFoundError(
        f"{error.name} is not installed; refill.testing needs: pip install 'refill-cache[service]'", name=error.name
    ) from None

__all__ = ["Pods", "packed"]

_ANSWER_SECONDS = 10
_COUNTS = ("planned", "received", "unconfirmed", "delivered", "missing", "duplicates", "damaged")
"""Of receipts: planned jobs have the first ones, others the last."""
_LOOK_AGAIN_SECONDS = 0.1


def packed(folder: str | os.PathLike[str], to: str | os.PathLike[str]) -> str:
    """Pack a folder as ``refill pack`` does; returns the dataset's URL.

    :param folder: of files, as docs/DATASETS.md says.
    :param to: a folder for the dataset, which is made.
    """
    url = Path(to).absolute().as_uri()
    asyncio.run(pack(os.fspath(folder), url))
    return url


class Pods:
    """Pods that know each other, each a process on loopback: started on entry, ended on exit.

    :param num_pods: how many, 1 to 16.
    :param settings: of all of them, as docs/POD.md names them, such as ``memory_bytes="64MiB"``.
    :raises InvalidInput: for settings that pods don't have or take.
    :raises PodUnreachable: on entry, when a pod does not start; it says why.
    """

    def __init__(self, num_pods: int = 1, **settings: str | int | float) -> None:
        if not 1 <= num_pods <= 16:
            raise InvalidInput(f"num_pods must be 1 to 16, got {num_pods!r}")
        load_settings(**settings)  # what is wrong is said before anything is started
        self._logs = tempfile.TemporaryDirectory(prefix="refill-testing-")
        self._cluster = LocalCluster(num_pods, Path(self._logs.name), settings)
        self._channel = PodChannel(Credentials(), _ANSWER_SECONDS)
        self._were_gone = False
        """Whether pods may have forgotten something, or can't be asked."""

    def __enter__(self) -> Pods:
        try:
            self._cluster.__enter__()
        except BaseException:
            self._logs.cleanup()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._cluster.__exit__(kind, error, trace)
        self._logs.cleanup()

    @property
    def url(self) -> str:
        """For CacheDataset: that of pod 0."""
        return self.urls[0]

    @property
    def urls(self) -> list[str]:
        """One for each pod."""
        return self._cluster.pod_urls

    def kill(self, pod: int) -> None:
        """End a pod at once, as a crash does: all that it held is gone."""
        self._were_gone = True
        self._cluster.kill(self._checked(pod))

    def restart(self, pod: int) -> None:
        """Start a pod that was killed again, at its address; returns when it takes requests."""
        self._cluster.restart(self._checked(pod))

    def pause(self, pod: int) -> None:
        """Let a pod stand still: connections stay open, and nothing is answered."""
        self._were_gone = True
        self._cluster.pause(self._checked(pod))

    def resume(self, pod: int) -> None:
        """Let a pod that stood still go on."""
        self._cluster.resume(self._checked(pod))

    def log(self, pod: int) -> str:
        """What a pod has written so far."""
        return self._cluster.log(self._checked(pod))

    def receipt(self, job: str, epoch: int, pod: int = 0) -> dict[str, Any]:
        """Of an epoch, as ``refill receipt`` has it, asked of a pod that runs.

        :raises UnknownJob: when no pod knows the job, or the epoch has not begun.
        """
        checked_epoch(epoch)
        path = f"/v1/jobs/{quote(job, safe='')}/epochs/{epoch}/receipt"
        return self._channel.call("GET", self.urls[self._checked(pod)], path, Wait(_ANSWER_SECONDS))

    def _checked(self, pod: int) -> int:
        if pod not in range(len(self.urls)):
            raise InvalidInput(f"there is no pod {pod!r}; there are pods 0 to {len(self.urls) - 1}")
        return pod

    def check_exact(self, job: str, epoch: int, pod: int = 0, timeout_seconds: float = 60) -> None:
        """Every sample of an epoch came exactly once. Ranks report what they had a moment later, which is waited for.

        :raises AssertionError: when it did not, with what the receipt says.
        :raises UnknownJob: when no pod has heard of it: at once if all are there and always were.
        """
        ends = time.monotonic() + timeout_seconds
        while True:
            is_last = time.monotonic() > ends
            try:
                found = self.receipt(job, epoch, pod)
            except UnknownJob:  # pods that were restarted are told again
                if is_last or not (self._were_gone or self._is_known(job, epoch)):
                    raise
            else:
                if found["exact"]:
                    return
                if is_last:
                    counts = {name: found[name] for name in _COUNTS if name in found}
                    raise AssertionError(f"epoch {epoch} of job {job} is not exact: {counts}")
            time.sleep(_LOOK_AGAIN_SECONDS)

    def _is_known(self, job: str, epoch: int) -> bool:
        """Whether any pod has heard of it: one that has much to do may not have answered the one that was asked."""
        for pod in range(len(self.urls)):
            with contextlib.suppress(UnknownJob):
                self.receipt(job, epoch, pod)
                return True
        return False
