"""A pod that stood still wakes beside its successor, which has its name by then: only one of them is used."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.chaos.tcp_relay import Link, Relay
from tests.integration.job_ranks import Packed, Ranks, check_receipt, settings_of
from tests.waiting import until

from refill_service.demo.local_cluster import LocalCluster

POD = 1
ENDS = f"refill: pod {POD} was started again while this process of it stood still or was cut off, and goes on there\n"


class Named(LocalCluster):
    """Pod 1 has a name, as pods of a StatefulSet do: a relay leads to where it is, and what is connected stays so."""

    def __init__(self, relay: Relay, folder: Path, *, journal: bool) -> None:
        kept = {"journal_dir": f"{folder}/journal-{{ordinal}}"} if journal else {}
        settings = {"memory_bytes": "4MiB", "pinned_fraction": 0, "recovery_seconds": 5} | kept
        self.links: list[Link] = []
        super().__init__(3, folder, settings, peer_url=self._by_name)
        self.links += [relay.link(port) for port in self._ports[POD]]
        self._folder = folder

    def _by_name(self, from_pod: int, to_pod: int, url: str) -> str:
        return f"http://127.0.0.1:{self.links[1].port}" if to_pod == POD else url

    @property
    def pod_urls(self) -> list[str]:
        urls = super().pod_urls
        if self.links:
            urls[POD] = f"http://127.0.0.1:{self.links[0].port}"
        return urls

    def replace(self, pod: int) -> subprocess.Popen[bytes]:
        """The successor has a copy of its journal."""
        if (self._folder / f"journal-{POD}").exists():
            shutil.copytree(self._folder / f"journal-{POD}", self._folder / "copied")
            self._environment["REFILL_JOURNAL_DIR"] = str(self._folder / "copied")
        earlier = super().replace(pod)
        for link, port in zip(self.links, (self.ports[pod], self.peer_ports[pod]), strict=True):
            link.to_port = port
        return earlier


@contextmanager
def cluster(folder: Path, *, journal: bool) -> Iterator[Named]:
    with Relay() as relay, Named(relay, folder, journal=journal) as pods:
        yield pods


@pytest.mark.parametrize("wakes", ["at once", "later"])
@pytest.mark.parametrize("journal", [True, False], ids=["journal", "no journal"])
def test_a_pod_that_wakes_beside_its_successor(packed: Packed, tmp_path: Path, journal: bool, wakes: str) -> None:
    with cluster(tmp_path, journal=journal) as pods:
        job = settings_of(packed[0], policy="drain")
        ranks = Ranks(pods, job)
        ranks.ask(0, 0, 100)
        pods.pause(POD)
        earlier = pods.replace(POD)
        pods.processes.append(earlier)  # to be ended with the others
        if wakes == "later":
            # Its own rank is connected to it, and comes to the successor with another process.
            ranks.ranks[POD]._channel.hang_up(pods.pod_urls[POD])
            ranks.ask(0, 100, 200)
        pods.resume(len(pods.processes) - 1)
        ranks.ask(0, 200 if wakes == "later" else 100, ranks.length)
        ranks.check(0)
        check_receipt(pods, job, 0)
        until(lambda: earlier.poll() is not None, "the end of the pod's earlier run")
        assert earlier.poll() == 2, "it must not end as if all was well"
        assert pods.log(POD).count(ENDS) == 1, pods.log(POD)
