"""What is left of a format where a rank wants some fields of its samples? Its description, without the others.

Pods leave the bytes of the others out in the format's own layout, so the parser of what is left reads what they send.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from refill.errors import InvalidInput
from refill.formats.litdata import LITDATA_MEDIA
from refill.protocol.sample_cut import SampleCut

_FIELDS: dict[str, tuple[str, Callable[[str], bool]]] = {
    "mds": ("columns", lambda kind: kind in ("bytes", "jpeg", "png")),
    "litdata": ("leaves", lambda kind: kind.partition(":")[0] in ("bytes", "jpeg", *LITDATA_MEDIA)),
    "parquet": ("columns", lambda kind: kind in ("bytes", "image")),
    "arrow": ("columns", lambda kind: kind in ("bytes", "image")),
}
"""By format: where its description has the fields, ``[name, kind, ...]`` each, and which kinds are bytes, of which
ranges may be had."""


def check_cut(cut: SampleCut, metadata: Mapping[str, Any]) -> None:
    """Raises :class:`InvalidInput` where a dataset's samples have no such parts."""
    about = metadata.get("format")
    if about is not None and not cut.is_whole:
        cut_format(about, cut)


def cut_format(about: Mapping[str, Any], cut: SampleCut) -> Mapping[str, Any]:
    """The description of a format as the parser is to have it. Raises :class:`InvalidInput`."""
    name = about.get("name")
    if "windows" in about:
        raise InvalidInput("members and ranges are not of windows: choose columns by refill index --columns")
    if name == "objects":
        _check_plain_file(about, cut)
    elif name == "zip":
        if about.get("whole") and cut.ranges:
            raise InvalidInput("ranges are of members that are bytes, and those of .npz are arrays: choose by members")
    elif name in _FIELDS and _FIELDS[name][0] in about:
        return _cut_fields(about, cut, *_FIELDS[name])
    else:
        raise InvalidInput(
            "members and ranges are of samples in tars, zip archives, MDS, LitData, Parquet, Arrow and plain files, and"
            f" this dataset's format is {str(name)[:60]}: have a transform leave out what is not wanted"
        )
    return about


def _check_plain_file(about: Mapping[str, Any], cut: SampleCut) -> None:
    asked = {*cut.members, *(each for each, _, _ in cut.ranges)} - {"cls"}
    if asked != {about.get("field")}:
        raise InvalidInput(
            f"samples are files of one field, {about.get('field')!r}, and not {', '.join(sorted(asked))}"
        )


def _cut_fields(
    about: Mapping[str, Any], cut: SampleCut, where: str, are_bytes: Callable[[str], bool]
) -> Mapping[str, Any]:
    kinds = {str(name): str(kind) for name, kind, *_ in about[where]}
    for name in (*cut.members, *(each for each, _, _ in cut.ranges)):
        if name not in kinds:
            raise InvalidInput(f"samples have no field {name!r}; they have {', '.join(map(repr, kinds))[:300]}")
    for name, _, _ in cut.ranges:
        if not are_bytes(kinds[name]):
            raise InvalidInput(f"ranges are of fields that are bytes, and {name!r} is {kinds[name]}: choose by members")
    left = [each for each in about[where] if not cut.members or str(each[0]) in cut.members]
    return {**about, where: left}
