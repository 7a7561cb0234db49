"""What does a pod leave open, by its settings? Said in its log, so that nobody takes a default for a wall."""

from __future__ import annotations

from refill_service.object_store.store_url import BUCKETS
from refill_service.settings import Settings

__all__ = ["what_is_open"]


def what_is_open(settings: Settings) -> list[str]:
    """A sentence for each thing, with the setting that closes it; none when nothing is open."""
    found, port = [], f"{settings.host}:{settings.port}"
    if not settings.client_tokens:
        found.append(f"whoever reaches {port} may register, read and end every job (client_tokens)")
    if settings.serves_peers and not settings.peers_are_known:
        found.append(f"so may whoever reaches {settings.host}:{settings.peer_port} (peer_token, peer_tls_cert)")
    if not settings.dataset_urls or any(f"{scheme}://" in settings.dataset_urls for scheme in BUCKETS):
        found.append("jobs may name every bucket that this pod can read (dataset_urls)")
    if "hf://" in settings.dataset_urls:
        found.append("jobs may name every dataset of the Hub that this pod can read (dataset_urls)")
    if "file:///" in settings.dataset_urls:
        found.append("jobs may name every folder that this pod can read (dataset_urls)")
    if not settings.tls_cert:
        what = "tokens and samples" if settings.client_tokens else "samples"
        found.append(f"{what} come and go in clear at {port} (tls_cert)")
    if settings.num_pods > 1 and not settings.peer_tls_cert:
        found.append("samples go in clear between pods (peer_tls_cert)")
    if settings.metrics_port:
        found.append(
            f"whoever reaches {settings.host}:{settings.metrics_port} sees the names of all jobs (metrics_port)"
        )
    return found
