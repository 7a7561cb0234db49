"""Azure Blob Storage: the containers of one storage account.

obstore finds the credentials: an account's key or SAS token, a client's secret, a federated token (workload identity of
AKS), or else the machine's own (managed identity).
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

from obstore.store import AzureStore as ObstoreAzure

from refill.errors import InvalidInput, StoreNotFound
from refill_service.object_store.base import ListedVersion
from refill_service.object_store.bucket_store import BucketStore, client_options, retry_config
from refill_service.object_store.store_counters import StoreCounters
from refill_service.object_store.store_settings import StoreSettings

if TYPE_CHECKING:
    from obstore.store import AzureConfig


class AzureStore(BucketStore):
    """A container of Azure Blob Storage."""

    NO_CREDENTIALS = (
        "set AZURE_STORAGE_ACCOUNT_KEY, AZURE_STORAGE_SAS_TOKEN or a client's id and secret, or read a public container"
        " with --no-sign-request"
    )

    def __init__(
        self, container: str, prefix: str, settings: StoreSettings, *, counters: StoreCounters | None = None
    ) -> None:
        url = f"az://{container}/{prefix}"
        if settings.azure_account is None:
            raise InvalidInput(
                f"{url} is a container of a storage account: name it by REFILL_STORE_AZURE_ACCOUNT (azure_account)"
            )
        where = settings.azure_endpoint_url or f"the Azure storage account {settings.azure_account}"
        super().__init__(url, container, prefix, where, settings, counters)

    async def _list(self, prefix: str) -> AsyncIterator[ListedVersion]:
        # Accounts with a hierarchical namespace list by folder.
        for found in sorted([each async for each in super()._list(prefix)], key=lambda each: each.key.encode()):
            # An answer to GET has quotes about it, a listing none.
            etag = found.etag if found.etag is None or found.etag.startswith('"') else f'"{found.etag}"'
            yield found._replace(etag=etag)

    async def _delete(self, key: str) -> None:
        try:
            await super()._delete(key)
        except StoreNotFound as error:
            if error.details.get("code") is not None:  # of the container
                raise

    def _open(self, *, once: bool) -> ObstoreAzure:
        settings = self._settings
        assert settings.azure_account is not None
        config: AzureConfig = {"account_name": settings.azure_account, "skip_signature": settings.anonymous}
        if settings.azure_endpoint_url is not None:
            config["endpoint"] = settings.azure_endpoint_url.rstrip("/")
        return ObstoreAzure(
            self._bucket,
            prefix=self._prefix or None,
            config=config,
            client_options=client_options(settings, settings.azure_endpoint_url),
            retry_config=retry_config(settings, once=once),
        )
