"""Which image exactly are ours built on? ``make base-image`` asks its registry, and writes the digest down.

    python docker/base_image.py [--registry URL] [--allow-offline] [DOCKERFILE ...]

A tag is moved to another image whenever the registry likes; a digest is one image for ever. What ``ARG PYTHON_IMAGE=``
names by a tag is named by the digest beside it from then on; asked again, by the newest one. Commit that.
``--registry`` is a mirror to ask. A registry that can't be asked is status 1, or 0 with ``--allow-offline``.
"""

from __future__ import annotations

import argparse
import hashlib
import re
import sys
from pathlib import Path

import httpx

__all__ = ["digest_of", "main"]

DOCKERFILES = [Path(__file__).parent / name for name in ("Dockerfile", "train.Dockerfile")]
_BASE = re.compile(r"^ARG PYTHON_IMAGE=(?P<host>[^/\s]+)/(?P<name>[^:@\s]+):(?P<tag>[^@\s]+)(@\S+)?$", re.MULTILINE)
_HOSTS = {"docker.io": "https://registry-1.docker.io"}
_INDEX = "application/vnd.oci.image.index.v1+json, application/vnd.docker.distribution.manifest.list.v2+json"
_TIMEOUT_SECONDS = 20


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--registry")
    parser.add_argument("--allow-offline", action="store_true")
    parser.add_argument("dockerfiles", nargs="*", type=Path, default=DOCKERFILES)
    given = parser.parse_args(arguments)
    for path in given.dockerfiles:
        text = path.read_text()
        if (base := _BASE.search(text)) is None:
            print(f"base image: {path.name} has no ARG PYTHON_IMAGE=HOST/NAME:TAG")
            return 1
        image = f"{base['host']}/{base['name']}:{base['tag']}"
        try:
            digest = digest_of(
                given.registry or _HOSTS.get(base["host"], f"https://{base['host']}"), base["name"], base["tag"]
            )
        except (httpx.HTTPError, ValueError) as error:
            print(
                f"base image: {path.name} is not pinned: {image} can't be asked for ({type(error).__name__}: {error})"
            )
            return 0 if given.allow_offline else 1
        path.write_text(_BASE.sub(f"ARG PYTHON_IMAGE={image}@{digest}", text, count=1))
        print(f"base image: {path.name} is built on {image}@{digest}")
    return 0


def digest_of(registry: str, name: str, tag: str) -> str:
    """Of the image for all platforms, computed from what the registry gives. Raises httpx's errors, and ValueError."""
    with httpx.Client(timeout=_TIMEOUT_SECONDS, follow_redirects=True, headers={"accept": _INDEX}) as client:
        url = f"{registry}/v2/{name}/manifests/{tag}"
        answer = client.get(url)
        if answer.status_code == httpx.codes.UNAUTHORIZED:
            wanted = dict(re.findall(r'(\w+)="([^"]*)"', answer.headers.get("www-authenticate", "")))
            given = client.get(wanted.pop("realm"), params=wanted).raise_for_status().json()
            answer = client.get(url, headers={"authorization": f"Bearer {given['token']}"})
        answer.raise_for_status()
    digest = f"sha256:{hashlib.sha256(answer.content).hexdigest()}"
    if answer.headers.get("docker-content-digest", digest) != digest:
        raise ValueError("what came is not what the registry says that it is")
    return digest


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
