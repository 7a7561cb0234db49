"""What did the pods' ``/metrics`` say at one moment? Parsed, to be summed by labels."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

from refill.errors import InvalidInput


@dataclass(frozen=True)
class PodScrape:
    """The metrics of one pod: the values of each name, with their labels."""

    values: dict[str, list[tuple[dict[str, str], float]]]

    @classmethod
    def parse(cls, text: str, source: str) -> PodScrape:
        values: dict[str, list[tuple[dict[str, str], float]]] = {}
        try:
            for family in text_string_to_metric_families(text):
                for sample in family.samples:
                    values.setdefault(sample.name, []).append((sample.labels, sample.value))
        except ValueError as error:
            raise InvalidInput(f"{source} answered, but not with metrics") from error
        return cls(values)

    def matching(self, name: str, labels: dict[str, str]) -> Iterator[tuple[dict[str, str], float]]:
        for found, value in self.values.get(name, ()):
            if labels.items() <= found.items():
                yield found, value


@dataclass(frozen=True)
class Scrape:
    """The metrics of all pods at about the same time.

    :param at_seconds: on a clock that runs evenly.
    :param pods: by URL; None for one that did not answer.
    """

    at_seconds: float
    pods: dict[str, PodScrape | None]

    def total(self, name: str, pod: str | None = None, **labels: str) -> float:
        """The sum over all pods, or of one, of the values that have these labels."""
        chosen = self.pods.values() if pod is None else [self.pods.get(pod)]
        return sum(value for scrape in chosen if scrape for _, value in scrape.matching(name, labels))

    def most(self, name: str, default: float, pod: str | None = None, **labels: str) -> float:
        chosen = self.pods.values() if pod is None else [self.pods.get(pod)]
        return max((v for scrape in chosen if scrape for _, v in scrape.matching(name, labels)), default=default)

    def most_by(self, name: str, label: str, **labels: str) -> dict[str, float]:
        """By what the label is, the largest value over all pods."""
        found: dict[str, float] = {}
        for scrape in self.pods.values():
            for has, value in scrape.matching(name, labels) if scrape else ():
                found[has[label]] = max(value, found.get(has[label], value))
        return found

    def labels(self, name: str, label: str, pod: str | None = None, **labels: str) -> list[str]:
        """What the label is in the values that have the others."""
        chosen = self.pods.values() if pod is None else [self.pods.get(pod)]
        return list({found[label]: None for each in chosen if each for found, _ in each.matching(name, labels)})

    def increase(self, before: Scrape, name: str, pod: str | None = None, **labels: str) -> float:
        """How much counters have grown since an earlier scrape, over the pods that answered both.

        A counter that has become smaller began anew, with its pod or its job, and counts from zero; so does one
        that was not there.
        """
        grown = 0.0
        for url in self.pods if pod is None else [pod]:
            now, then = self.pods.get(url), before.pods.get(url)
            if now is not None and then is not None:
                earlier = {_key(found): value for found, value in then.matching(name, labels)}
                for found, value in now.matching(name, labels):
                    was = earlier.get(_key(found), 0.0)
                    grown += value - was if value >= was else value
        return grown


def _key(labels: dict[str, str]) -> tuple[tuple[str, str], ...]:
    return tuple(sorted(labels.items()))
