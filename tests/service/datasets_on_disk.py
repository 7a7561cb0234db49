"""Folders to pack, and a look at what came out that does not use the code under test."""

from __future__ import annotations

import io
import random
import tarfile
from pathlib import Path

import xxhash


def image_folder(root: Path, classes: int = 3, per_class: int = 20, seed: int = 0) -> dict[str, bytes]:
    """Files by relative path: every sample has a .jpg, every third a .json beside it."""
    made = random.Random(seed)
    files = {}
    for label in range(classes):
        for number in range(per_class):
            stem = f"class-{label}/image_{label}_{number}"
            files[f"{stem}.jpg"] = made.randbytes(made.randrange(1, 4000))
            if number % 3 == 0:
                files[f"{stem}.json"] = b'{"n": %d}' % number
    write_files(root, files)
    return files


def write_files(root: Path, files: dict[str, bytes]) -> None:
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


def tar_of(members: list[tuple[str, bytes]], format: int = tarfile.PAX_FORMAT) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=format) as tar:
        for name, content in members:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


def members_of(blob: bytes) -> list[tuple[str, bytes]]:
    with tarfile.open(fileobj=io.BytesIO(blob)) as tar:
        return [(member.name, tar.extractfile(member).read()) for member in tar]  # type: ignore[union-attr]


def digest(data: bytes) -> int:
    return xxhash.xxh3_64_intdigest(data)
