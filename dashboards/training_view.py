"""Does the cache keep the training fed, and how far is it? By job and rank."""

from __future__ import annotations

from panel_kinds import JOB, View, figure, graph

__all__ = ["TRAINING"]

BY_JOB = "sum by (job, training_job)"
RECEIVED = f"refill_rank_received{{{JOB}}}"


def _rate(metric: str, more: str = "") -> str:
    return f"{BY_JOB} (rate({metric}{{{JOB}{more}}}[$__rate_interval]))"


TRAINING = View(
    "training",
    "refill / Training",
    "Whether training waits for data, how fast it goes, and how far it is.",
    [
        (
            "How far",
            [
                figure(
                    "Progress through the epoch",
                    "percentunit",
                    "Requests of the running epoch that were answered, or sent ahead.",
                    f"{BY_JOB} (refill_epoch_answered{{{JOB}}}) / {BY_JOB} (refill_epoch_positions{{{JOB}}})",
                ),
                figure(
                    "Epoch",
                    "none",
                    "Numbered from 0; -1 before the first.",
                    f"max by (job, training_job) (refill_epoch{{{JOB}}})",
                ),
                figure(
                    "Epoch ends in",
                    "s",
                    "At the speed of now.",
                    f"""({BY_JOB} (refill_epoch_positions{{{JOB}}}) - {BY_JOB} (refill_epoch_answered{{{JOB}}}))
                    / ({BY_JOB} (rate(refill_takes_total{{{JOB}}}[$__rate_interval])) > 0)""",
                ),
                figure(
                    "Samples a second",
                    "short",
                    "All ranks together.",
                    f"{BY_JOB} (rate(refill_requests_total{{{JOB}}}[$__rate_interval]))",
                ),
            ],
        ),
        (
            "Waiting",
            [
                graph(
                    "Time that loops wait for data",
                    "percentunit",
                    "Part of the time that a rank's training loop is blocked in its loader (refill.timed). 0: data is "
                    "never what it waits for.",
                    (
                        "sum by (job, training_job, rank) "
                        f"(rate(refill_client_data_wait_seconds_total{{{JOB}}}[$__rate_interval]))",
                        "{{job}}: {{training_job}} rank {{rank}}",
                    ),
                    bad_from=0.2,
                ),
                graph(
                    "Samples a second, by rank",
                    "short",
                    "That ranks fetched, as they report it (refill.timed).",
                    (
                        "sum by (job, training_job, rank) "
                        f"(rate(refill_client_samples_total{{{JOB}}}[$__rate_interval]))",
                        "{{job}}: {{training_job}} rank {{rank}}",
                    ),
                ),
                graph(
                    "Time that requests wait for the store",
                    "s",
                    "For each sample that had to be waited for.",
                    (
                        f"{_rate('refill_miss_wait_seconds_total')} / ({_rate('refill_waited_takes_total')} > 0)",
                        "{{job}}: {{training_job}}",
                    ),
                    quiet="nothing waits",
                ),
                graph(
                    "Ranks that are behind",
                    "short",
                    "Samples of the epoch that another rank has received more, with policy planned. A rank that stands "
                    "still falls behind; where ranks go in step, the others then wait for it.",
                    (
                        f"-max by (job, training_job, rank) ({RECEIVED}) "
                        f"+ on (job, training_job) group_left max by (job, training_job) ({RECEIVED})",
                        "{{job}}: {{training_job}} rank {{rank}}",
                    ),
                    quiet="no job with policy planned",
                ),
            ],
        ),
        (
            "What it takes",
            [
                graph(
                    "Miss rate",
                    "percentunit",
                    "Requests that nothing in memory could answer, so that they waited for the store.",
                    (f"{_rate('refill_misses_total')} / {_rate('refill_takes_total')}", "{{job}}: {{training_job}}"),
                ),
                graph(
                    "Waste",
                    "percentunit",
                    "Part of the bytes read that found their slot occupied. Policy planned wastes none.",
                    (
                        f"{_rate('refill_bytes_wasted_total')} / {_rate('refill_bytes_read_total')}",
                        "{{job}}: {{training_job}}",
                    ),
                    most=1,
                ),
                graph(
                    "Read amplification",
                    "short",
                    "Bytes read from the store for each byte delivered: below 1 when the pinned tier helps. At the end "
                    "of an epoch it rises, as the next one is loaded, and falls after.",
                    (
                        f"({_rate('refill_bytes_read_total')} + {_rate('refill_exact_bytes_total')}) "
                        f"/ {_rate('refill_bytes_delivered_total')}",
                        "{{job}}: {{training_job}}",
                    ),
                ),
                graph(
                    "Delivered",
                    "Bps",
                    "Bytes of samples in answers to ranks.",
                    (_rate("refill_bytes_delivered_total"), "{{job}}: {{training_job}}"),
                ),
                graph(
                    "Where requests are answered",
                    "short",
                    "By the home pod's own share, by samples sent ahead to it, by another pod on demand, or as "
                    "repeats of a sample (padding, replacement).",
                    (
                        f"sum by (answered) (rate(refill_requests_total{{{JOB}}}[$__rate_interval]))",
                        "{{answered}}",
                    ),
                    stacked=True,
                ),
                graph(
                    "Damaged samples",
                    "short",
                    'That ranks went on without, as jobs with on_damaged="skip" do.',
                    (
                        f"{BY_JOB} (increase(refill_damaged_samples_total{{{JOB}}}[$__rate_interval]))",
                        "{{job}}: {{training_job}}",
                    ),
                ),
                graph(
                    "Receipts: what was not delivered exactly once",
                    "short",
                    "Requests of epochs that are over, of jobs with a live policy: missing (the epoch was left early), "
                    "duplicates (never by design).",
                    (
                        "sum by (job, training_job, outcome) (increase("
                        f'refill_receipt_requests_total{{{JOB}, outcome!="delivered"}}[$__rate_interval]))',
                        "{{job}}: {{training_job}} {{outcome}}",
                    ),
                    bad_from=1,
                    quiet="no epoch of a live policy is over",
                ),
            ],
        ),
    ],
)
