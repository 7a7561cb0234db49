"""S3 and what speaks its protocol: MinIO, Ceph, R2.

boto3's session finds the credentials, so that profiles, SSO, web identity (IRSA), containers and instance roles work as
users know them.
"""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

from obstore.store import S3Store as ObstoreS3

from refill.errors import StoreDenied
from refill_service.object_store.bucket_store import BucketStore, client_options, retry_config
from refill_service.object_store.store_counters import StoreCounters
from refill_service.object_store.store_settings import StoreSettings

if TYPE_CHECKING:
    from obstore.store import S3Config, S3Credential

_CREDENTIALS_LIVE = timedelta(minutes=10)
"""How long credentials are used before boto3 is asked again; it renews those that expire 10 to 15 minutes ahead."""

_WRONG_REGION = ("PermanentRedirect", "AuthorizationHeaderMalformed", "IllegalLocationConstraintException")


class S3Store(BucketStore):
    """A bucket of S3, or of a server that speaks its protocol."""

    NO_CREDENTIALS = "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, a profile or a role"

    def __init__(
        self, bucket: str, prefix: str, settings: StoreSettings, *, counters: StoreCounters | None = None
    ) -> None:
        where = settings.endpoint_url or "AWS"
        super().__init__(f"s3://{bucket}/{prefix}", bucket, prefix, where, settings, counters)

    def _open(self, *, once: bool) -> ObstoreS3:
        settings = self._settings
        region, credentials = settings.region, None
        if not settings.anonymous:
            credentials, profile_region = _find_credentials(settings.profile, self.url)
            region = region or profile_region
        config: S3Config = {
            "region": region or "us-east-1",
            "virtual_hosted_style_request": not settings.uses_path_style,
            "skip_signature": settings.anonymous,
            "request_payer": settings.requester_pays,
            # Not every server has DeleteObjects, and its answers bury refusals in a 200.
            "disable_bulk_delete": True,
        }
        if settings.endpoint_url is not None:
            config["endpoint"] = _endpoint(settings, self._bucket)
        return ObstoreS3(
            self._bucket,
            prefix=self._prefix or None,
            config=config,
            client_options=client_options(settings, settings.endpoint_url),
            retry_config=retry_config(settings, once=once),
            credential_provider=credentials,
        )

    def _is_elsewhere(self, code: str | None, status: int | None, text: str) -> bool:
        return code in _WRONG_REGION or "redirect without LOCATION" in text or status == 301


class _Credentials:
    """What obstore asks for credentials; boto3's may go to the network, so it is asked in a thread."""

    def __init__(self, credentials: Any) -> None:
        self._credentials = credentials

    async def __call__(self) -> S3Credential:
        frozen = await asyncio.to_thread(self._credentials.get_frozen_credentials)
        return {
            "access_key_id": frozen.access_key,
            "secret_access_key": frozen.secret_key,
            "token": frozen.token,
            "expires_at": datetime.now(UTC) + _CREDENTIALS_LIVE,
        }


def _find_credentials(profile: str | None, url: str) -> tuple[_Credentials, str | None]:
    """Credentials by boto3's chain, and the region of the profile."""
    import boto3
    from botocore.exceptions import BotoCoreError, ClientError

    try:
        session = boto3.Session(profile_name=profile)
        credentials = session.get_credentials()
        if credentials is not None:
            credentials.get_frozen_credentials()
    except (BotoCoreError, ClientError) as error:  # the second: STS refused
        raise StoreDenied(f"{url}: can't get credentials: {error}") from error
    if credentials is None:
        raise StoreDenied(
            f"{url}: found no credentials; {S3Store.NO_CREDENTIALS}, or read a public bucket with --no-sign-request"
        )
    return _Credentials(credentials), session.region_name


def _endpoint(settings: StoreSettings, bucket: str) -> str:
    """obstore wants the bucket in the endpoint where requests are to name it in the host."""
    assert settings.endpoint_url is not None
    url = settings.endpoint_url.rstrip("/")
    if settings.uses_path_style:
        return url
    scheme, _, host = url.partition("://")
    return url if host.startswith(f"{bucket}.") else f"{scheme}://{bucket}.{host}"
