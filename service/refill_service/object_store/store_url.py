"""What does the URL of a dataset or store name? One place takes it apart, so that what was allowed is what is opened.

``s3://``, ``gs://`` and ``az://`` name a bucket by the grammar of its cloud and a prefix that is taken letter by
letter; so does ``hf://datasets/OWNER/NAME@REVISION/folder``. ``file:///folder`` names a folder, ``https://host/folder``
one of a web server, both percent-encoded. Two URLs are the same place when, and only when, they are equal here.
"""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass
from urllib.parse import quote, unquote

from refill.errors import InvalidInput

BUCKETS = ("s3", "gs", "az")
"""Schemes of stores that hold buckets."""
WEB = ("http", "https")
"""Their URLs name the server, too."""
SCHEMES = ("file", *BUCKETS, "hf", *WEB)

_BUCKET = {
    "s3": re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]"),
    "gs": re.compile(r"[a-z0-9][a-z0-9._-]{1,220}[a-z0-9]"),
    "az": re.compile(r"[a-z0-9](-?[a-z0-9]){2,62}"),
}
_LETTERS = {
    "s3": "3 to 63 of a-z, 0-9, '.' and '-', first and last a letter or digit",
    "gs": "3 to 222 of a-z, 0-9, '.', '_' and '-', first and last a letter or digit",
    "az": "3 to 63 of a-z, 0-9 and single '-', first and last a letter or digit",
}
_SERVER = {"s3": "endpoint_url", "gs": "gcs_endpoint_url", "az": "azure_account"}
_IP_ADDRESS = re.compile(r"\d+\.\d+\.\d+\.\d+")
_HOST = re.compile(r"([a-z0-9]([a-z0-9._-]*[a-z0-9])?|\[[0-9a-f:.]+\])(:([1-9]\d{0,4}))?")
_DEFAULT_PORT = {"http": "80", "https": "443"}
_HUB_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}")
_REVISION = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,199}")


@dataclass(frozen=True)
class StoreUrl:
    """A place in a store."""

    scheme: str
    """One of ``SCHEMES``."""
    segments: tuple[str, ...]
    """Of the path from the root of the machine, decoded; or the bucket, or the host, and the parts of the prefix; or
    ``datasets``, the owner, name and revision, and these. None is empty, ``.`` or ``..``."""

    @property
    def bucket(self) -> str:
        return self.segments[0]

    @property
    def prefix(self) -> str:
        return "/".join(self.segments[1:])

    @property
    def folder(self) -> str:
        return "/" + "/".join(self.segments)

    def is_within(self, other: StoreUrl) -> bool:
        """Whether it is the other place, or lies below it."""
        return self.scheme == other.scheme and self.segments[: len(other.segments)] == other.segments

    def __str__(self) -> str:
        """The one way to write it."""
        if self.scheme == "file":
            return f"file://{quote(self.folder)}"
        if self.scheme in WEB:
            return f"{self.scheme}://{'/'.join((self.bucket, *(quote(each, safe='') for each in self.segments[1:])))}"
        return f"{self.scheme}://{'/'.join(self.segments)}"


def parse_url(url: str) -> StoreUrl:
    """Raises :class:`InvalidInput` with one line for what is no URL of a store."""
    parsed = parse_url_beginning(url)
    if parsed.scheme in BUCKETS and not parsed.segments:
        raise InvalidInput(f"{url!r} names no bucket; write {parsed.scheme}://bucket/prefix")
    if parsed.scheme == "hf" and len(parsed.segments) < 3:
        raise InvalidInput(f"{url!r} names no dataset; write hf://datasets/OWNER/NAME/folder")
    return parsed


def parse_url_beginning(url: str) -> StoreUrl:
    """As :func:`parse_url`, but ``s3://`` alone is what holds all buckets, as ``file:///`` holds all folders, and
    ``hf://datasets/OWNER`` what is the owner's."""
    scheme, separator, rest = url.partition("://")
    scheme = scheme.lower()
    if not separator or scheme not in SCHEMES:
        as_url = f"file://{quote(url)}" if url.startswith("/") else "s3://bucket/prefix or file:///folder"
        raise InvalidInput(f"{url!r} is not a URL of a store; write {as_url}")
    if scheme == "file":
        host, _, path = rest.partition("/")
        if host not in ("", "localhost"):
            raise InvalidInput(f"{url!r}: a file URL has three slashes, as in file:///{rest}")
        segments = _folders(unquote(path))
    else:
        first, _, prefix = rest.partition("/")
        prefix = prefix.strip("/")
        segments = (first, *prefix.split("/")) if prefix else (first,) if first else ()
    if scheme in BUCKETS and segments:
        _check_bucket(url, scheme, segments[0])
    elif scheme in WEB:
        segments = _on_server(url, scheme, segments)
    elif scheme == "hf":
        segments = _of_hub(url, segments)
    for segment in segments:
        # A proxy before the store may decode, and go up.
        if scheme != "file" and unquote(segment) in ("", ".", ".."):
            raise InvalidInput(f"{url!r} holds an empty part, '.' or '..'; write the path without it")
        if any(unicodedata.category(letter) in ("Cc", "Cs") for letter in unquote(segment)):
            raise InvalidInput(f"{url!r} holds characters that no URL has")
    return StoreUrl(scheme, segments)


def _folders(path: str) -> tuple[str, ...]:
    """The parts of a path from the root, without '.', and with '..' taken as what is above it by name."""
    folders: list[str] = []
    for part in path.split("/"):
        if part == "..":
            del folders[-1:]
        elif part not in ("", "."):
            folders.append(part)
    return tuple(folders)


def _check_bucket(url: str, scheme: str, bucket: str) -> None:
    """A bucket's name becomes part of a request's host or path: nothing but a name may be taken for one."""
    if not bucket:
        raise InvalidInput(f"{url!r} names no bucket; write {scheme}://bucket/prefix")
    if not _BUCKET[scheme].fullmatch(bucket) or ".." in bucket or _IP_ADDRESS.fullmatch(bucket):
        raise InvalidInput(
            f"{url!r}: {bucket!r} is not the name of a bucket ({_LETTERS[scheme]}); the server is set by the setting "
            f"{_SERVER[scheme]}, never by a URL"
        )


def _on_server(url: str, scheme: str, segments: tuple[str, ...]) -> tuple[str, ...]:
    host = segments[0].lower() if segments else ""
    found = _HOST.fullmatch(host)
    if found is None or int(found[4] or 1) > 65535:
        raise InvalidInput(f"{url!r} names no server; write {scheme}://host/folder, or host:port, without a user")
    if "?" in url or "#" in url:
        raise InvalidInput(
            f"{url!r} has a query: a dataset is a folder of files that are read by path. Write %3F and %23 for ? and #"
            " in a name"
        )
    if found[4] == _DEFAULT_PORT[scheme]:
        host = found[1]
    parts = tuple(unquote(part) for part in segments[1:])
    if any("/" in part or "\\" in part for part in parts):
        raise InvalidInput(f"{url!r} holds a slash that is written as %2F, or a backslash: write the path without it")
    return (host, *parts)


def _of_hub(url: str, segments: tuple[str, ...]) -> tuple[str, ...]:
    if segments[:1] not in ((), ("datasets",)):
        raise InvalidInput(f"{url!r}: only datasets are read from the Hub; write hf://datasets/OWNER/NAME/folder")
    if len(segments) > 1 and not _HUB_NAME.fullmatch(segments[1]):
        raise InvalidInput(f"{url!r}: {segments[1]!r} is no owner of datasets on the Hub")
    if len(segments) > 2:
        name, at, revision = segments[2].partition("@")
        if not _HUB_NAME.fullmatch(name):
            raise InvalidInput(f"{url!r}: {name!r} is no name of a dataset on the Hub")
        said = unquote(revision)
        if at and (not _REVISION.fullmatch(said) or ".." in said or "//" in said):
            raise InvalidInput(f"{url!r}: {revision!r} is no revision (a branch, tag or commit, with %2F for '/')")
        segments = (*segments[:2], f"{name}{at}{quote(said, safe='')}", *segments[3:])
    return segments
