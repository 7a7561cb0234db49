"""Which labels do metrics have, for whoever writes them and whoever reads them?"""

from __future__ import annotations

JOB = "training_job"
"""Names a job: Prometheus puts a label ``job`` of its own on what it scrapes, and would rename ours."""

OTHER_RANKS = "other"
"""In place of a rank's number: all that have no series of their own."""
