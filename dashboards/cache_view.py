"""How are the pods? Memory, store, peers, and what they wait for."""

from __future__ import annotations

from panel_kinds import CACHE, View, graph

__all__ = ["CACHE_VIEW"]

BY_POD = "sum by (job, instance)"
RANGE = f"{{{CACHE}}}[$__rate_interval]"
READS = f'{{{CACHE}, operation="read_range"}}[$__rate_interval]'

_TAKES = f"{BY_POD} (rate(refill_takes_total{RANGE}))"


def _latency(quantile: float) -> tuple[str, str]:
    buckets = f"sum by (le) (rate(refill_store_request_seconds_bucket{READS}))"
    return f"histogram_quantile({quantile}, {buckets})", f"{quantile:.0%} are faster"


CACHE_VIEW = View(
    "cache",
    "refill / Cache",
    "How the pods are: memory, the store, other pods, and what they wait for.",
    [
        (
            "Memory",
            [
                graph(
                    "Samples in memory",
                    "bytes",
                    "All pods together, by kind of memory, below what they were given.",
                    (f"sum by (kind) (refill_resident_bytes{{{CACHE}}})", "{{kind}}"),
                    (f"sum (refill_memory_budget_bytes{{{CACHE}}})", "budget"),
                    stacked=True,
                    limit="budget",
                ),
                graph(
                    "Fullest pods",
                    "percentunit",
                    "Bytes of samples in memory, of the pod's budget.",
                    (
                        f"{BY_POD} (refill_resident_bytes{{{CACHE}}}) "
                        f"/ {BY_POD} (refill_memory_budget_bytes{{{CACHE}}})",
                        "{{job}}: {{instance}}",
                    ),
                ),
                graph(
                    "Resident set, of what is promised",
                    "percentunit",
                    "A pod promises to stay below its budget + 15 % + 200 MB, which is the container's limit.",
                    (
                        f"process_resident_memory_bytes{{{CACHE}}} / on (job, instance) "
                        f"refill_memory_promised_bytes{{{CACHE}}}",
                        "{{job}}: {{instance}}",
                    ),
                    bad_from=0.9,
                ),
            ],
        ),
        (
            "Refills and the store",
            [
                graph(
                    "Refills",
                    "short",
                    "Chunks a second: ordered, those that the pinned tier had, and those that failed.",
                    (f"sum (rate(refill_refills_total{RANGE}))", "ordered"),
                    (f"sum (rate(refill_refills_pinned_total{RANGE}))", "from the pinned tier"),
                    (f"sum (rate(refill_refills_failed_total{RANGE}))", "failed"),
                ),
                graph(
                    "Fill rate",
                    "percentunit",
                    "Samples put into slots, of those that were read. Policy planned fills all.",
                    (
                        f"{BY_POD} (rate(refill_samples_filled_total{RANGE})) "
                        f"/ {BY_POD} (rate(refill_samples_read_total{RANGE}))",
                        "{{job}}: {{instance}}",
                    ),
                    most=1,
                ),
                graph(
                    "Bytes from the store",
                    "Bps",
                    "",
                    (f"{BY_POD} (rate(refill_store_bytes_total{READS}))", "{{job}}: {{instance}}"),
                    stacked=True,
                ),
                graph(
                    "Time of reads from the store",
                    "s",
                    "Retries included.",
                    _latency(0.5),
                    _latency(0.9),
                    _latency(0.99),
                ),
                graph(
                    "Store requests that failed for good",
                    "short",
                    "A second, by what went wrong.",
                    (f"sum by (operation, error) (rate(refill_store_errors_total{RANGE}))", "{{operation}} {{error}}"),
                    quiet="no errors",
                ),
                graph(
                    "Pinned",
                    "bytes",
                    "What stays from epoch to epoch.",
                    (f'sum (refill_resident_bytes{{{CACHE}, kind="pinned"}})', "in memory"),
                    (f"sum (refill_pinned_disk_bytes{{{CACHE}}})", "on disk"),
                ),
            ],
        ),
        (
            "Pods among each other",
            [
                graph(
                    "Sent to other pods",
                    "Bps",
                    "",
                    (f"{BY_POD} (rate(refill_peer_sent_bytes_total{RANGE}))", "{{job}}: {{instance}}"),
                    quiet="nothing was sent yet",
                ),
                graph(
                    "Samples sent ahead",
                    "short",
                    "A second: sent by owners, used by home pods, refused since the rank had been answered otherwise.",
                    (f"sum by (outcome) (rate(refill_prefetched_samples_total{RANGE}))", "{{outcome}}"),
                ),
                graph(
                    "Hot pods",
                    "short",
                    "Requests answered by each pod's share, of the mean of all pods. 1: the load is even.",
                    (f"{_TAKES} / on (job) group_left () avg by (job) ({_TAKES})", "{{job}}: {{instance}}"),
                ),
                graph(
                    "CPU",
                    "short",
                    "Cores that each pod uses.",
                    (f"{BY_POD} (rate(process_cpu_seconds_total{RANGE}))", "{{job}}: {{instance}}"),
                ),
                graph(
                    "Requests refused",
                    "short",
                    "A second, by status. 503: the client asks again by itself.",
                    (f"sum by (status) (rate(refill_refused_requests_total{RANGE}))", "{{status}}"),
                    quiet="none",
                ),
                graph(
                    "Slow clients cut off",
                    "short",
                    "A second.",
                    (f"{BY_POD} (rate(refill_connections_cut_total{RANGE}))", "{{job}}: {{instance}}"),
                ),
            ],
        ),
        (
            "Pods that are lost",
            [
                graph(
                    "Requests that wait for a pod",
                    "short",
                    "By the pod that they wait for.",
                    (f"sum by (job, peer) (refill_waiting_requests{{{CACHE}}})", "{{job}}: for pod {{peer}}"),
                    bad_from=1,
                ),
                graph(
                    "Pods that are away",
                    "short",
                    "By how many pods they are found so. Others answer in their place for jobs with policy planned.",
                    (f"sum by (job, peer) (refill_peer_away{{{CACHE}}})", "{{job}}: pod {{peer}}"),
                    bad_from=1,
                ),
            ],
        ),
    ],
    by_job=False,
)
