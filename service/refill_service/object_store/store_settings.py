"""How is the object store to be reached? Frozen, checked once; docs/SETTINGS.md is made of it."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from refill.errors import InvalidInput

USUAL_NAMES = {
    "endpoint_url": ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"),
    "region": ("AWS_REGION", "AWS_DEFAULT_REGION"),
    "ca_bundle": ("AWS_CA_BUNDLE",),
    "requester_pays": ("AWS_REQUESTER_PAYS",),
    "gcs_endpoint_url": ("GOOGLE_BASE_URL",),
    "azure_account": ("AZURE_STORAGE_ACCOUNT_NAME", "AZURE_STORAGE_ACCOUNT"),
    "azure_endpoint_url": ("AZURE_STORAGE_ENDPOINT",),
    "hub_endpoint_url": ("HF_ENDPOINT",),
}
"""Variables of the clouds that are asked after refill's own, by setting."""
_AZURE_ACCOUNT = re.compile("[a-z0-9]{3,24}")
_PROJECT = re.compile("[a-z0-9.:-]{1,100}")


@dataclass(frozen=True)
class StoreSettings:
    """Raises :class:`InvalidInput` with one line that names the setting. ``file://`` uses ``max_connections`` only."""

    endpoint_url: str | None = None
    """``http://`` or ``https://`` URL of an S3 server other than AWS. Pods speak plain HTTP only to such a URL."""
    region: str | None = None
    """None: that of the AWS profile, else ``us-east-1``."""
    path_style: bool | None = None
    """``endpoint/bucket/key``, not ``bucket.endpoint/key``. None: true if there is an ``endpoint_url``."""
    profile: str | None = None
    """Profile of ``~/.aws`` with credentials and region. None: that of ``AWS_PROFILE``, or the default one."""
    anonymous: bool = False
    """Sign nothing, and look for no credentials: for public buckets."""
    requester_pays: bool = False
    """Who reads S3 buckets pays for the requests, where their owner wants that."""
    gcs_endpoint_url: str | None = None
    """URL of a server that speaks Google Cloud Storage's protocol, in place of Google's."""
    gcs_user_project: str | None = None
    """The project that pays for requests to Google's buckets whose owner wants that."""
    azure_account: str | None = None
    """The storage account whose containers ``az://`` names."""
    azure_endpoint_url: str | None = None
    """URL of the account in place of https://ACCOUNT.blob.core.windows.net."""
    hub_endpoint_url: str | None = None
    """Where the datasets of ``hf://`` are, in place of https://huggingface.co."""
    ca_bundle: str | None = None
    """PEM file with certificates that are trusted besides those of the system, for a private endpoint."""
    connect_timeout_seconds: float = 2.0
    """For reaching the server, TLS included. Each try looks its name up again."""
    request_timeout_seconds: float = 60.0
    """For one try of a request, from connecting to the last byte."""
    max_connections: int = 32
    """Requests under way at once, and those of a pod for samples of all its datasets together; more wait. An upload in
    parts counts as one, and has up to 4. For ``file://`` it is the number of threads."""
    max_retries: int = 8
    """How often a request is tried again after status 5xx or 429, a timeout or a lost connection."""
    retry_timeout_seconds: float = 120.0
    """No retry begins later than this after the first try."""
    first_backoff_seconds: float = 0.1
    """Pause before the first retry. It doubles each time, varied at random, up to ``max_backoff_seconds``."""
    max_backoff_seconds: float = 10.0
    """The longest such pause."""

    def __post_init__(self) -> None:
        for name in ("endpoint_url", "gcs_endpoint_url", "azure_endpoint_url", "hub_endpoint_url"):
            url = getattr(self, name)
            if url is not None and not url.lower().startswith(("http://", "https://")):
                raise InvalidInput(f"{name} must start with http:// or https://, got {url!r}")
        # Both become part of a host or a header.
        if self.azure_account is not None and not _AZURE_ACCOUNT.fullmatch(self.azure_account):
            raise InvalidInput(f"azure_account must be 3 to 24 of a-z and 0-9, got {self.azure_account!r}")
        if self.gcs_user_project is not None and not _PROJECT.fullmatch(self.gcs_user_project):
            raise InvalidInput(f"gcs_user_project must be a project's id or number, got {self.gcs_user_project!r}")
        for name in (
            "connect_timeout_seconds",
            "request_timeout_seconds",
            "retry_timeout_seconds",
            "first_backoff_seconds",
            "max_backoff_seconds",
        ):
            value = getattr(self, name)
            if not 0.001 <= value <= 86_400:
                raise InvalidInput(f"store setting {name} must be 0.001 to 86400 seconds, got {value!r}")
        if not 1 <= self.max_connections <= 4096:
            raise InvalidInput(f"store setting max_connections must be 1 to 4096, got {self.max_connections!r}")
        if not 0 <= self.max_retries <= 1000:
            raise InvalidInput(f"store setting max_retries must be 0 to 1000, got {self.max_retries!r}")

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] | None = None, **given: Any) -> StoreSettings:
        """``given`` values but None, else ``REFILL_STORE_<NAME>``, else the cloud's own name, else the default.

        An empty variable counts as not set.
        """
        environ = os.environ if environ is None else environ
        values = {name: value for name, value in given.items() if value is not None}
        for field in dataclasses.fields(cls):
            if field.name in values:
                continue
            own = f"REFILL_STORE_{field.name.upper()}"
            for variable in (own, *USUAL_NAMES.get(field.name, ())):
                if environ.get(variable):
                    values[field.name] = _parsed(str(field.type), environ[variable], variable)
                    break
        return cls(**values)

    def ca_certificates(self) -> bytes | None:
        """What ``ca_bundle`` holds. Raises :class:`InvalidInput` where it can't be read."""
        if self.ca_bundle is None:
            return None
        try:
            return Path(self.ca_bundle).read_bytes()
        except OSError as error:
            raise InvalidInput(f"can't read ca_bundle {self.ca_bundle}: {error.strerror}") from error

    @property
    def uses_path_style(self) -> bool:
        return self.endpoint_url is not None if self.path_style is None else self.path_style


def _parsed(kind: str, text: str, variable: str) -> Any:
    try:
        if kind.startswith("bool"):
            return {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}[text.lower()]
        if kind == "int":
            return int(text)
        if kind == "float":
            return float(text)
    except (KeyError, ValueError):
        wanted = "true or false" if kind.startswith("bool") else "a number"
        raise InvalidInput(f"environment variable {variable} must be {wanted}, got {text!r}") from None
    return text
