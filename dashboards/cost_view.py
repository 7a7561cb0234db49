"""What does the store charge, beside what it would charge for one GET a sample?

Requests to the store are counted by pod, for all of its jobs and for their indexes; so this view has no choice of jobs.
"""

from __future__ import annotations

from panel_kinds import CACHE, View, figure, graph

__all__ = ["COST"]

GETS = f'refill_store_requests_total{{{CACHE}, operation="read_range"}}'
READ = f'refill_store_bytes_total{{{CACHE}, operation="read_range"}}'
SAMPLES = f"refill_requests_total{{{CACHE}}}"
DELIVERED = f"refill_bytes_delivered_total{{{CACHE}}}"
PINNED = f"refill_bytes_pinned_total{{{CACHE}}}"


def _rate(counter: str) -> str:
    return f"sum by (job) (rate({counter}[$__rate_interval]))"


def _total(counter: str) -> str:
    return f"sum by (job) (increase({counter}[$__range]))"


COST = View(
    "cost",
    "refill / Cost",
    "Requests and bytes asked of the store, beside one GET for each sample that was delivered.",
    [
        (
            "In the time shown",
            [
                figure(
                    "GETs made",
                    "short",
                    "Ranged reads of the store. A read that a store refuses and that is tried again counts once.",
                    _total(GETS),
                    "{{job}}",
                ),
                figure(
                    "GETs that one for each sample would have been",
                    "short",
                    "Samples delivered.",
                    _total(SAMPLES),
                    "{{job}}",
                ),
                figure(
                    "Paid for GETs",
                    "currencyUSD",
                    "At the price given above; 0.0004 is what S3 Standard asks for 1,000.",
                    f"{_total(GETS)} / 1000 * $price",
                    "{{job}}",
                ),
                figure(
                    "Saved on GETs",
                    "currencyUSD",
                    "Against one GET for each sample.",
                    f"({_total(SAMPLES)} - {_total(GETS)}) / 1000 * $price",
                    "{{job}}",
                ),
            ],
        ),
        (
            "Requests",
            [
                graph(
                    "GETs a second",
                    "short",
                    "Made, and what one for each sample would be.",
                    (_rate(GETS), "{{job}}: made"),
                    (_rate(SAMPLES), "{{job}}: one for each sample"),
                ),
                graph(
                    "GETs for 1,000 samples",
                    "short",
                    "1,000 without a cache.",
                    (f"1000 * {_rate(GETS)} / {_rate(SAMPLES)}", "{{job}}"),
                ),
                graph(
                    "Other requests to the store",
                    "short",
                    "A second.",
                    (
                        "sum by (job, operation) (rate("
                        f'refill_store_requests_total{{{CACHE}, operation!="read_range"}}[$__rate_interval]))',
                        "{{job}}: {{operation}}",
                    ),
                ),
            ],
        ),
        (
            "Bytes",
            [
                graph(
                    "Read and delivered",
                    "Bps",
                    "What is read from the store, and what training received.",
                    (_rate(READ), "{{job}}: read"),
                    (_rate(DELIVERED), "{{job}}: delivered"),
                    (_rate(PINNED), "{{job}}: from the pinned tier"),
                ),
                graph(
                    "Bytes read for each byte delivered",
                    "short",
                    "1 without a cache; below 1 when the pinned tier helps.",
                    (f"{_rate(READ)} / {_rate(DELIVERED)}", "{{job}}"),
                ),
                graph(
                    "Bytes of a GET",
                    "bytes",
                    "On average. Larger ones cost fewer requests.",
                    (f"{_rate(READ)} / {_rate(GETS)}", "{{job}}"),
                ),
            ],
        ),
    ],
    by_job=False,
    price=True,
)
