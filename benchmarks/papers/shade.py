"""SHADE: how often its sampler finds its draws in its cache, by how often it repeats what is there; and how it ranks.

    python -m benchmarks.papers.shade [--samples 20000]

Losses are made up, exp(N(0,1)) x exp(N(0,1) / 2), anew in each epoch, as in the outside simulation whose answers stand
beside: it drew 20,000 samples. With fewer they are the same within a few hundredths.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import numpy as np
from benchmarks.papers.drawn_orders import DrawnOrders
from benchmarks.papers.ordered_reads import OrderedRun, simulate_orders
from benchmarks.papers.page import Row, print_rows

from refill.protocol.importance import rank_scores

__all__ = ["HITS", "hits_and_distinct", "rows"]

HITS = ((1.0, 0.2, 0.325, 0.62), (2.0, 0.2, 0.552, None), (2.5, 0.2, 0.681, 0.42), (3.0, 0.2, 0.843, 0.30))
"""Repetition, memory as a part of the samples; hits, and the part of the samples that come in an epoch."""
EPOCHS, FIRST = 8, 4


def hits_and_distinct(
    num_samples: int, part: float, repetition: float, epochs: int = EPOCHS, first: int = FIRST
) -> tuple[float, float]:
    """As parts of the positions and of the samples, in the mean of the epochs from ``first`` on."""
    generator = np.random.default_rng(1)
    base, of_epochs = generator.standard_normal(num_samples), generator.standard_normal((epochs, num_samples))
    drawn = DrawnOrders(np.exp(base + 0.5 * of_epochs), 1, seed=0, repetition=repetition, improving=False)
    run = OrderedRun(num_samples, int(part * num_samples), batch_size=64, eviction="importance")
    found = list(simulate_orders(run, [], epochs, drawn=drawn))[first:]
    hits = np.mean([epoch.hits for epoch in found]) / num_samples
    return float(hits), float(np.mean([epoch.distinct or 0 for epoch in found])) / num_samples


def rows(num_samples: int = 2000) -> Iterator[Row]:
    losses = (0.3, 0.5, 0.4)
    got = " ".join(f"{score:.2f}" for score in rank_scores(np.array(losses)))
    yield Row("EXACT ranks of the losses .3 .5 .4", "2.30 2.48 2.40", got)
    for repetition, part, hits, distinct in HITS:
        found_hits, found_distinct = hits_and_distinct(num_samples, part, repetition)
        name = f"repetition {repetition:g}, memory {part:.0%}"
        yield Row(f"EXACT {name}: hits", f"{hits:.3f}", f"{found_hits:.3f}")
        if distinct is not None:
            yield Row(f"EXACT {name}: samples that come", f"{distinct:.2f}", f"{found_distinct:.2f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=2000)
    print_rows("SHADE", rows(parser.parse_args().samples))
