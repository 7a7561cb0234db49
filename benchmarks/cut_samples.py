"""What does it cost a pod to send parts of samples (``members=``)? ``make bench-cuts``.

One thread, samples in memory: a picture of 20 kB, a number and a text each. Printed is CPU of a sample, and how long a
batch would hold the pod's loop without turns.
"""

from __future__ import annotations

import io
import struct
import tarfile
import time
from collections.abc import Mapping
from typing import Any

from refill.protocol.sample_cut import SampleCut
from refill_service.datasets.sample_members import members_of
from refill_service.serving.cut_samples import CUT_AT_ONCE, cut_samples

_BATCH = 4096
_PICTURE, _TEXT = bytes(20_000), b"a text of some words" * 5


def samples() -> dict[str, tuple[Mapping[str, Any], bytes]]:
    """By format: what its index says, and a sample."""
    sizes = len(_PICTURE), len(_TEXT)
    values = struct.pack("<2I", *sizes) + _PICTURE + struct.pack("<q", 7) + _TEXT
    row = struct.pack("<BIqI", 0, sizes[0], 7, sizes[1]) + _PICTURE + _TEXT
    return {
        "tar": ({}, _tar()),
        "mds": (_about("mds", [["jpg", "jpeg", None], ["n", "int", 8], ["text", "str", None]]), values),
        "parquet": (_about("parquet", [["jpg", "bytes"], ["n", "int64"], ["text", "str"]]), row),
    }


def _about(name: str, columns: list[list[Any]]) -> dict[str, Any]:
    return {"format": {"name": name, "columns": columns}}


def _tar() -> bytes:
    key, members = members_of({"jpg": _PICTURE, "json": {"n": 7}, "txt": _TEXT.decode()}, 1)
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for name, data in members:
            header = tarfile.TarInfo(f"{key}.{name}")
            header.size = len(data)
            archive.addfile(header, io.BytesIO(data))
    return out.getvalue()[: -(-sum(512 + -(-len(data) // 512) * 512 for _, data in members) // 512) * 512]


def main() -> None:
    for name, (metadata, sample) in samples().items():
        for wanted in ("jpg", "txt" if name == "tar" else "text"):
            cut, best = SampleCut((wanted,)), float("inf")
            for _ in range(7):
                started = time.process_time()
                cut_samples(cut, metadata, range(_BATCH), [sample] * _BATCH)
                best = min(best, time.process_time() - started)
            print(
                f"{name:8} members={wanted:5} {best / _BATCH * 1e6:5.1f} us a sample; {_BATCH:,} at once would hold "
                f"the loop for {best * 1e3:.0f} ms, {CUT_AT_ONCE} do for {best * CUT_AT_ONCE / _BATCH * 1e3:.1f} ms"
            )


if __name__ == "__main__":
    main()
