"""Google Cloud Storage.

obstore finds the credentials: those of a service account's key, those that ``gcloud auth application-default login``
left, or else the machine's own, which on GKE are the pod's (Workload Identity).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from obstore.store import GCSStore as ObstoreGCS

from refill_service.object_store.bucket_store import BucketStore, client_options, retry_config
from refill_service.object_store.store_counters import StoreCounters
from refill_service.object_store.store_settings import StoreSettings

if TYPE_CHECKING:
    from obstore.store import GCSConfig


class GCSStore(BucketStore):
    """A bucket of Google Cloud Storage."""

    NO_CREDENTIALS = (
        "set GOOGLE_APPLICATION_CREDENTIALS, run gcloud auth application-default login, or read a public bucket with"
        " --no-sign-request"
    )

    def __init__(
        self, bucket: str, prefix: str, settings: StoreSettings, *, counters: StoreCounters | None = None
    ) -> None:
        where = settings.gcs_endpoint_url or "Google Cloud Storage"
        super().__init__(f"gs://{bucket}/{prefix}", bucket, prefix, where, settings, counters)

    def _open(self, *, once: bool) -> ObstoreGCS:
        settings = self._settings
        config: GCSConfig = {"skip_signature": settings.anonymous}
        if settings.gcs_endpoint_url is not None:
            config["base_url"] = settings.gcs_endpoint_url.rstrip("/")
        options = client_options(settings, settings.gcs_endpoint_url)
        if settings.gcs_user_project is not None:
            options["default_headers"] = {"x-goog-user-project": settings.gcs_user_project}
        return ObstoreGCS(
            self._bucket,
            prefix=self._prefix or None,
            config=config,
            client_options=options,
            retry_config=retry_config(settings, once=once),
        )
