"""Which formats are there, and which one lies at a URL?"""

from __future__ import annotations

from refill.errors import EmptyDataset, InvalidInput
from refill_service.formats import FORMAT_NAMES, jsonl, litdata, mds, megatron, objects, tfrecord, tokens, webdataset
from refill_service.formats.interface import Format, Listing, Options, Plan, Source

__all__ = ["FORMATS", "planned"]

_MODULES: tuple[Format, ...] = (mds, webdataset, megatron, tokens, tfrecord, jsonl, objects, litdata)
FORMATS = {name: next(each for each in _MODULES if name == each.NAME) for name in FORMAT_NAMES}
"""By name, in the order in which they are looked for."""

_REFUSED = (
    (
        (".tar.gz", ".tgz", ".tar.zst", ".tar.bz2", ".tar.xz"),
        "that are compressed: pods read parts of a tar, so unpack them first",
    ),
    (
        (".tfrecord.gz", ".tfrecords.gz", ".jsonl.gz", ".jsonl.zst", ".ndjson.gz", ".json.gz"),
        "that are compressed, so samples can't be read by ranges of bytes: decompress them first",
    ),
    (
        (".parquet", ".arrow", ".feather"),
        "of Parquet or Arrow, whose rows can't be read by ranges of bytes: write them out, as WebDataset "
        "or MDS for example",
    ),
    ((".pkl", ".pickle"), "of pickles, which run as code when they are read, and refill reads none"),
)
"""By the ends of names: what can't be read where it lies, why, and what to do."""


async def planned(listing: Listing, source: Source, options: Options, name: str | None = None) -> tuple[Format, Plan]:
    """The format with this name, or the first one that is found, and what it makes of what lies there.

    Raises :class:`InvalidInput` for a name that is none, :class:`EmptyDataset` where nothing is found that can be read,
    and what the format raises.
    """
    if name is not None:
        if name not in FORMATS:
            raise InvalidInput(f"there is no format {name!r}; there are {', '.join(FORMATS)}")
        return FORMATS[name], await FORMATS[name].plan(listing, source, options)
    for each in FORMATS.values():
        if each.found(listing, options):
            return each, await each.plan(listing, source, options)
    nothing = f"{listing.url} holds no .tar, and nothing else that refill reads where it lies"
    for endings, why in _REFUSED:
        if those := listing.named(*endings):
            raise EmptyDataset(f"{nothing}, but {len(those):,} {why}")
    raise EmptyDataset(nothing)
