"""What does the URL of a dataset or store name? One place takes it apart, so that what was allowed is what is opened.

``s3://bucket/prefix`` names a bucket by S3's grammar and a prefix that is taken letter by letter; ``file:///folder`` a
folder, percent-encoded. Two URLs are the same place when, and only when, they are equal here.
"""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass
from urllib.parse import quote, unquote

from refill.errors import InvalidInput

__all__ = ["StoreUrl", "parse_url", "parse_url_beginning"]

_BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")
_IP_ADDRESS = re.compile(r"\d+\.\d+\.\d+\.\d+")


@dataclass(frozen=True)
class StoreUrl:
    """A place in a store."""

    scheme: str
    """``s3`` or ``file``."""
    segments: tuple[str, ...]
    """Of the path from the root of the machine, decoded; or the bucket and the parts of the prefix. None is empty,
    ``.`` or ``..``."""

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
        return f"file://{quote(self.folder)}" if self.scheme == "file" else f"s3://{'/'.join(self.segments)}"


def parse_url(url: str) -> StoreUrl:
    """Raises :class:`InvalidInput` with one line for what is no URL of a store."""
    parsed = parse_url_beginning(url)
    if parsed.scheme == "s3" and not parsed.segments:
        raise InvalidInput(f"{url!r} names no bucket; write s3://bucket/prefix")
    return parsed


def parse_url_beginning(url: str) -> StoreUrl:
    """As :func:`parse_url`, but ``s3://`` alone is what holds all buckets, as ``file:///`` holds all folders."""
    scheme, separator, rest = url.partition("://")
    scheme = scheme.lower()
    if not separator or scheme not in ("s3", "file"):
        as_url = f"file://{quote(url)}" if url.startswith("/") else "s3://bucket/prefix or file:///folder"
        raise InvalidInput(f"{url!r} is not a URL of a store; write {as_url}")
    if scheme == "file":
        host, _, path = rest.partition("/")
        if host not in ("", "localhost"):
            raise InvalidInput(f"{url!r}: a file URL has three slashes, as in file:///{rest}")
        segments = _folders(unquote(path))
    else:
        bucket, _, prefix = rest.partition("/")
        prefix = prefix.strip("/")
        segments = (bucket, *prefix.split("/")) if prefix else (bucket,) if bucket else ()
        if segments:
            _check_bucket(url, bucket)
    for segment in segments:
        # A proxy before the store may decode, and go up.
        if scheme == "s3" and unquote(segment) in ("", ".", ".."):
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


def _check_bucket(url: str, bucket: str) -> None:
    """A bucket's name becomes part of a request's host or path: nothing but a name may be taken for one."""
    if not bucket:
        raise InvalidInput(f"{url!r} names no bucket; write s3://bucket/prefix")
    if not _BUCKET.fullmatch(bucket) or ".." in bucket or _IP_ADDRESS.fullmatch(bucket):
        raise InvalidInput(
            f"{url!r}: {bucket!r} is not the name of a bucket (3 to 63 of a-z, 0-9, '.' and '-', first and last a "
            "letter or digit); the server is set by the setting endpoint_url, never by a URL"
        )
