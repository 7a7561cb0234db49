"""Windows of tars: a sample is several samples of WebDataset, one after another. Each field has the values of all."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from refill.formats.parsed import Parser, damaged
from refill.formats.tar_samples import Members, parse_members


def make_parser(about: Mapping[str, Any]) -> Parser:
    """Fields are lists of bytes, as long as windows; None where a sample has no such member. ``__keys__`` are the keys
    of all; the window's own is that of the first."""
    length = int(about["windows"][0])

    def parse(data: memoryview, sample_id: int) -> tuple[str, dict[str, Any]]:
        samples = list[tuple[str, Members]]()
        parse_members(data, sample_id, samples)
        if len(samples) != length:
            raise damaged(sample_id, "window", len(data), f"it holds {len(samples)} samples, and not {length}")
        names = dict.fromkeys(name for _, members in samples for name in members)
        fields: dict[str, Any] = {name: [members.get(name) for _, members in samples] for name in names}
        return samples[0][0], fields | {"__keys__": [key for key, _ in samples]}

    return parse
