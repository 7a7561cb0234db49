"""What does a real cluster do to a job that runs? ``make test-cluster``, or ``python -m tests.cluster --values FILE``.

Installs the chart of this tree as a release of its own, runs a job of two ranks, and does to it, one after another,
what happens to pods in a cluster. After each event every sample of the epochs in which it fell has to have come exactly
once, by what the ranks got and by the pods' receipt. Prints the table of docs/CLUSTER.md; exit status 1 if anything was
wrong.

KUBECONFIG names the cluster. The values say which image, store and dataset there are, as for an installation; what they
name (Secrets) is to be in the namespace. What the cluster can't do is skipped, with the reason.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
import time
from pathlib import Path
from types import FrameType

import helm_python
import yaml
from benchmarks.machine import machine
from tests.cluster.cluster import CHART, RELEASE, Cluster, Failed, Skipped
from tests.cluster.events import EVENTS, Event
from tests.cluster.example import run_example
from tests.cluster.memory import Memory, MemoryWatch
from tests.cluster.options import Options
from tests.cluster.ranks import RANKS, Ranks, RanksEnded, rank_pod
from tests.cluster.rows import HEAD, Row
from tests.cluster.soak import SOAKED, Soak
from tests.cluster.soak_report import report

from refill_service.interrupts import interrupts_after

_PODS = 3


def main() -> int:
    parser = _parser()
    given = parser.parse_args()
    if given.list:
        print(*map(_listed, EVENTS), sep="\n")
        return 0
    events = _chosen(given, parser)
    values = _values(given, parser)
    if shutil.which("kubectl") is None:
        parser.error("kubectl is not installed")
    if "KUBECONFIG" not in os.environ and not (Path.home() / ".kube" / "config").exists():
        parser.error("KUBECONFIG is not set: it names the cluster to try")
    cluster = Cluster(given.namespace, values)
    _check_is_free(cluster, given, parser)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _stop)
    return _Trial(cluster, values, given).run(events)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.cluster", description=__doc__.partition("\n")[0])
    parser.add_argument("--values", type=Path, help="of the chart: image, store, dataset.url, ...; needed")
    parser.add_argument(
        "--namespace", default="default", help="that has the Secrets which the values name (default: %(default)s)"
    )
    parser.add_argument("--only", help="events by name, such as delete,drain (see --list; default: all)")
    parser.add_argument("--list", action="store_true", help="name the events, and what they need, and run nothing")
    parser.add_argument("--replace", action="store_true", help=f"remove a release {RELEASE} that is there already")
    parser.add_argument(
        "--batch-seconds",
        type=float,
        default=0.1,
        help="how long a rank computes for each batch (default: %(default)s)",
    )
    parser.add_argument("--cut-node", default="", help="command that cuts the power of the node named after it")
    parser.add_argument(
        "--stop-pod", default="", help="command that sends SIGSTOP to the processes of the pod named after it"
    )
    parser.add_argument("--training-image", default="", help="with PyTorch, as docker/train.Dockerfile makes it")
    parser.add_argument(
        "--client-secret", default="", help="for values with tokens or TLS: Secret with the ranks' token and ca.crt"
    )
    parser.add_argument("--rotate", default="", help="command that replaces tokens and certificates of the release")
    parser.add_argument("--dns-off", default="", help="command that takes the cluster's DNS away")
    parser.add_argument("--dns-on", default="", help="command that brings it back")
    parser.add_argument("--api-off", default="", help="command that takes the API server away")
    parser.add_argument("--api-on", default="", help="command that brings it back")
    parser.add_argument("--soak-minutes", type=float, help="one event a minute at random, for so long")
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("soak-cluster"),
        help="folder of the soak's tables and plot (default: %(default)s)",
    )
    parser.add_argument("--seed", type=int, default=1, help="of the soak's events (default: %(default)s)")
    return parser


def _chosen(given: argparse.Namespace, parser: argparse.ArgumentParser) -> list[Event]:
    known = [event.name for event in EVENTS]
    only = known if given.only is None else [name.strip() for name in given.only.split(",")]
    if unknown := [name for name in only if name not in known]:
        parser.error(f"--only {', '.join(map(repr, unknown))}: no such event; --list names them")
    if given.soak_minutes is not None:
        only = [name for name in only if name in _soaked(given)]
    if not only:
        parser.error(f"--only {given.only}: a soak with these options does {', '.join(sorted(_soaked(given)))}")
    return [event for event in EVENTS if event.name in only]


def _soaked(given: argparse.Namespace) -> set[str]:
    without = {"dns": given.dns_off, "api": given.api_off, "rotate": given.rotate}
    return SOAKED - {name for name, command in without.items() if not command}


def _values(given: argparse.Namespace, parser: argparse.ArgumentParser) -> dict[str, object]:
    """What the release is installed with."""
    if given.values is None:
        parser.error("--values is needed: a file of the chart's values, as you would install it with")
    try:
        values = yaml.safe_load(given.values.read_text()) or {}
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        parser.error(f"{given.values} can't be read as values: {' '.join(str(error).split())}")
    if not isinstance(values, dict) or not (values.get("dataset") or {}).get("url"):
        parser.error(f"{given.values}: dataset.url is needed, a dataset that the pods can read")
    secured = (values.get("access") or {}).get("clientTokens") or (values.get("tls") or {}).get("secret")
    if secured and not given.client_secret:
        parser.error(f"{given.values} has tokens or TLS: --client-secret is needed, with what ranks show and trust")
    return {"insecure": not secured, **values, "replicas": _PODS}


def _check_is_free(cluster: Cluster, given: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    try:
        if not cluster.has_namespace():
            parser.error(f"the cluster has no namespace {given.namespace}: --namespace names one")
        if cluster.is_installed() and not given.replace:
            parser.error(
                f"release {RELEASE} is there already, in namespace {given.namespace}: somebody runs this, or it was "
                "left by a run that was killed; --replace removes it"
            )
    except Failed as failure:
        why = str(failure).splitlines()[-1]  # before it stand kubectl's own attempts
        parser.error(f"{why} (KUBECONFIG={os.environ.get('KUBECONFIG', '')})")


class _Trial:
    """One release, one job, and the rows of the table so far."""

    def __init__(self, cluster: Cluster, values: dict[str, object], given: argparse.Namespace) -> None:
        self._cluster, self._values, self._given = cluster, values, given
        self._failed = 0
        self._logged: list[str] = []
        self._peaks: dict[str, Memory] = {}

    def run(self, events: list[Event]) -> int:
        major, minor = self._cluster.version
        nodes = self._cluster.nodes()
        print(f"Kubernetes {major}.{minor}, {len(nodes)} nodes, tests run on: {machine()}\n")
        print(HEAD, flush=True)
        try:
            self._install()
            self._with_ranks(events)
        except (Failed, helm_python.HelmError) as failure:
            self._add(Row("", f"**failed**: {failure}"))
            self._failed += 1
        finally:
            with interrupts_after():
                self._tried("`helm uninstall`", self._uninstall)
        print()
        for pod, memory in sorted(self._peaks.items()):
            print(f"{pod}: at most {memory}, page cache and all")
        if self._logged:
            print("\nWhat logs warned of last, in each event:", *self._logged, sep="\n")
        return 1 if self._failed else 0

    def _install(self) -> None:
        for path in sorted((CHART / "ci").glob("*-values.yaml")):
            self._tried(f"would install `ci/{path.name}`", lambda path=path: self._would_install(path))
        self._cluster.uninstall()
        began = time.monotonic()
        self._cluster.install()
        self._add(Row("`helm install`", "", time.monotonic() - began))
        self._tried("`helm test`", lambda: "" if self._cluster.helm_test() else "said nothing")
        self._tried("`helm/examples/train.yaml`, two ranks of PyTorch", self._example)

    def _uninstall(self) -> str:
        self._cluster.uninstall()
        if left := self._cluster.left_over():
            raise Failed(f"left over: {', '.join(left)}")
        return ""

    def _example(self) -> str:
        if self._given.client_secret:
            raise Skipped("it is tried without tokens and TLS")
        if not self._given.training_image:
            raise Skipped("--training-image was not given")
        dataset = str(self._values["dataset"]["url"])  # type: ignore[index]
        return run_example(self._cluster, self._given.training_image, dataset)

    def _would_install(self, path: Path) -> str:
        try:
            self._cluster.would_install(yaml.safe_load(path.read_text()))
        except helm_python.HelmError as error:
            if "no matches for kind" in str(error):
                raise Skipped("the cluster has no CRDs of the Prometheus operator") from None
            raise Failed(str(error)) from None
        return ""

    def _tried(self, what: str, trial: object) -> None:
        began = time.monotonic()
        try:
            said = trial()  # type: ignore[operator]
        except Skipped as skipped:
            self._add(Row(what, f"skipped: {skipped}"))
        except (Failed, helm_python.HelmError) as failure:
            self._failed += 1
            self._add(Row(what, f"**failed**: {failure}"))
        else:
            self._add(Row(what, "", time.monotonic() - began, said=said))

    def _with_ranks(self, events: list[Event]) -> None:
        dataset = str(self._values["dataset"]["url"])  # type: ignore[index]
        # Where a node is to be lost, the ranks are on another one.
        node = self._cluster.nodes()[0] if self._given.cut_node else None
        ranks = Ranks(
            self._cluster,
            self._cluster.service_url,
            dataset,
            self._given.batch_seconds,
            node,
            self._given.client_secret,
        )
        watch = MemoryWatch(self._cluster, [rank_pod(rank) for rank in range(RANKS)])
        try:
            ranks.until_they_run(0)
            quiet = time.time()
            ranks.until_finished(1)
            exact, stalls = self._exactness(ranks, 0, 0), self._stalls(ranks, quiet)
            self._add(Row("nothing, for an epoch", exact, 0.0, *stalls, self._most_memory(watch, quiet)))
            if self._given.soak_minutes is not None:
                self._soak(events, ranks, watch)
            else:
                for event in events:
                    self._event(event, ranks, watch)
        finally:
            with interrupts_after():
                ranks.end()
                watch.end()
                self._peaks = watch.highest_since(0)

    def _soak(self, events: list[Event], ranks: Ranks, watch: MemoryWatch) -> None:
        def do(event: Event) -> Row:
            try:
                return self._event(event, ranks, watch)
            except RanksEnded:
                raise
            except (Failed, helm_python.HelmError) as failure:
                self._failed += 1
                return self._add(Row(event.says, f"**failed**: {failure}"))

        soak = Soak(ranks, watch, do, self._given.out)
        try:
            soak.run(events, self._given.soak_minutes, self._given.seed)
        finally:
            print()
            self._failed += not report(soak.keep())

    def _event(self, event: Event, ranks: Ranks, watch: MemoryWatch) -> Row:
        given = self._given
        options = Options(
            given.cut_node, given.stop_pod, (given.dns_off, given.dns_on), (given.api_off, given.api_on), given.rotate
        )
        looked = time.time()
        watch.look()
        first, since, told = ranks.finished(), time.time(), len(ranks.said)
        try:
            seen = event.run(self._cluster, options)
        except Skipped as skipped:
            return self._add(Row(event.says, f"skipped: {skipped}"))
        ready = time.time() - since
        ranks.until_they_run(time.time())
        ended = ranks.finished()
        ranks.until_finished(ended + 1)
        exact = self._exactness(ranks, first, ended)
        watch.look()
        said = "; ".join(filter(None, [self._cluster.warnings(since), seen]))
        if given.soak_minutes is None:
            logged = [*self._cluster.logged(since), *(f"a rank: {line}" for line in ranks.said[told:][-1:])]
            self._logged += [f"- {event.says}: {line}" for line in logged]
        stalls, memory = self._stalls(ranks, since), self._most_memory(watch, looked)
        return self._add(Row(event.says, exact, ready, *stalls, memory, said, event.to_do))

    def _exactness(self, ranks: Ranks, first: int, last: int) -> str:
        """Of these epochs, by what the ranks got, and of the last one by the pods' receipt. Those of epochs before it
        may lack something, as pods were lost."""
        wrong = [ranks.wrong_in(epoch) for epoch in range(first, last + 1)]
        if (receipt := ranks.receipts.get(last, "none")) != "exact":
            wrong.append(f"receipt of epoch {last}: {receipt}")
        said = "; ".join(filter(None, wrong))
        self._failed += bool(said)
        return f"**no**: {said}" if said else "yes"

    def _stalls(self, ranks: Ranks, since: float) -> tuple[float, float]:
        gaps = ranks.gaps(since)
        return gaps[0], sum(gap for gap in gaps if gap > 1) / RANKS

    def _most_memory(self, watch: MemoryWatch, since: float) -> str:
        """Of the pods that were there, the one whose cgroup has counted most."""
        found = watch.highest_since(since).values()
        return str(max(found, key=lambda memory: memory.most_bytes)) if found else ""

    def _add(self, row: Row) -> Row:
        print(row, flush=True)
        return row


def _listed(event: Event) -> str:
    needs = [f"needs {event.needs}"] if event.needs else []
    apart = [] if event.name in SOAKED else ["not in a soak"]
    return f"{event.name:10}{'; '.join([event.says, *needs, *apart])}"


def _stop(number: int, frame: FrameType | None) -> None:
    """The run ends with all that it started, and nothing ends that half-way."""
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, signal.SIG_IGN)
    print("\ninterrupted: what was made in the cluster is removed, which takes a minute or so", flush=True)
    raise KeyboardInterrupt


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
