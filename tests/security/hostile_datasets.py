"""What would somebody write who wishes the pods ill? Indexes with right checksums that say whatever they like."""

from __future__ import annotations

import dataclasses
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit

import numpy as np
import xxhash

from refill_service.cache_core.dataset_index import (
    BLOCK_SAMPLES,
    HEADER_BYTES,
    INDEX_KEY,
    RECORD,
    BlobTable,
    DatasetIndex,
    SampleRecords,
    decode_header,
    decode_index,
    encode_block,
    encode_head,
    sample_checksum,
)
from refill_service.datasets.index_writer import IndexWriter

_NUMBERS = (
    "num_samples", "num_blobs", "sample_bytes", "metadata_bytes", "names_bytes", "fingerprint", "metadata_checksum",
    "blobs_checksum",
)  # fmt: skip
"""Of the header, in their order."""


class Claim(NamedTuple):
    """What an index says of one sample."""

    offset: int
    length: int
    checksum: int = 0


def claim_of(data: bytes, offset: int = 0) -> Claim:
    return Claim(offset, len(data), sample_checksum(data))


def write_index(
    folder: Path,
    blobs: Sequence[tuple[str, int, Sequence[Claim]]],
    *,
    fingerprint: int = 1,
    sample_bytes: int | None = None,
    metadata: dict[str, Any] | None = None,
) -> str:
    """The index of a dataset whose blobs are ``(name, size in bytes, samples)``. Returns the dataset's URL."""
    folder.mkdir(parents=True, exist_ok=True)
    claims = [claim for _, _, samples in blobs for claim in samples]
    table = BlobTable(
        [name for name, _, _ in blobs],
        np.cumsum([0, *(len(samples) for _, _, samples in blobs)]).astype(np.int64),
        np.array([size for _, size, _ in blobs], dtype=np.int64),
    )
    records = SampleRecords(
        0,
        np.array([claim.offset for claim in claims], dtype=np.int64),
        np.array([claim.length for claim in claims], dtype=np.int64),
        np.array([claim.checksum for claim in claims], dtype=np.uint64),
    )
    total = sum(claim.length for claim in claims) if sample_bytes is None else sample_bytes
    _, head = encode_head(table, sample_bytes=total, fingerprint=fingerprint, wide=True, metadata=metadata or {})
    blocks = b"".join(
        encode_block(
            records.part(first, min(first + BLOCK_SAMPLES, len(claims))),
            block=first // BLOCK_SAMPLES,
            fingerprint=fingerprint,
            wide=True,
        )
        for first in range(0, len(claims), BLOCK_SAMPLES)
    )
    (folder / INDEX_KEY).write_bytes(head + blocks)
    return folder.as_uri()


def index_of(url: str) -> tuple[DatasetIndex, SampleRecords]:
    """The index of a dataset in a folder, and all its records."""
    data = (Path(unquote(urlsplit(url).path)) / INDEX_KEY).read_bytes()
    header = decode_header(data, url)
    index = decode_index(header, data[HEADER_BYTES : header.head_bytes])
    start, stop = index.records_range(0, index.num_samples)
    return index, index.decode_records(data[start:stop], 0, index.num_samples)


def header_bytes(**fields: Any) -> bytes:
    """The header of an index, as ``IndexHeader`` names its fields, with a right checksum of its own."""
    _, head = encode_head(
        BlobTable([], np.zeros(1, np.int64), np.zeros(0, np.int64)),
        sample_bytes=0,
        fingerprint=1,
        wide=True,
        metadata={},
    )
    header = dataclasses.replace(decode_header(head, ""), **fields)
    packed = bytearray(head[:HEADER_BYTES])
    packed[12:16] = header.record_bytes.to_bytes(4, "little")
    for place, name in enumerate(_NUMBERS):
        packed[24 + 8 * place : 32 + 8 * place] = getattr(header, name).to_bytes(8, "little")
    packed[-8:] = xxhash.xxh3_64_intdigest(bytes(packed[:-8])).to_bytes(8, "little")
    return bytes(packed)


def write_many_samples(folder: Path, num_samples: int) -> str:
    """A sound dataset whose samples have a byte each, all in one blob. Returns its URL."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "blob-000000.tar").write_bytes(b"x" * num_samples)
    records = np.zeros(num_samples, dtype=RECORD)
    records["offset"], records["length"], records["checksum"] = np.arange(num_samples), 1, sample_checksum(b"x")
    with tempfile.TemporaryDirectory() as spool, IndexWriter(Path(spool)) as writer:
        writer.add_blob("blob-000000.tar", num_samples, [records])
        shutil.copy(writer.finish({}), folder / INDEX_KEY)
    return folder.as_uri()
