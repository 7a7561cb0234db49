"""Which formats are there, and which one lies at a URL?"""

from __future__ import annotations

from refill.errors import EmptyDataset, InvalidInput
from refill_service.formats import (
    FORMAT_NAMES,
    arrayrecord,
    arrow,
    jsonl,
    lerobot,
    litdata,
    mds,
    megatron,
    objects,
    parquet,
    tfrecord,
    tokens,
    webdataset,
    zip,
)
from refill_service.formats.interface import HIDDEN, INDEX_JSON, Format, Listing, Options, Plan, Source, refuse_options
from refill_service.formats.rows import RowFormat

_MODULES: tuple[Format, ...] = (
    lerobot, mds, webdataset, parquet, arrow, megatron, tokens, tfrecord, arrayrecord, jsonl, zip, objects, litdata,
)  # fmt: skip
FORMATS = {name: next(each for each in _MODULES if name == each.NAME) for name in FORMAT_NAMES}
"""By name, in the order in which they are looked for."""

TABLES: dict[str, RowFormat] = {each.NAME: each for each in (parquet, arrow, lerobot)}
"""Those whose samples are rows, which are decoded a group at a time."""

_OF_TOKENS = (tokens.NAME, megatron.NAME, litdata.NAME)
_WITH_PICKLES = (mds.NAME, litdata.NAME)

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
        (".pkl", ".pickle"),
        "of pickles, which run as code when they are read, and refill reads none: write them anew as JSON lines or"
        " Parquet; --format objects has their bytes as samples",
    ),
    (
        (".h5", ".hdf5"),
        "of HDF5, whose chunks are found through trees in the file: write what is in them as .npz or WebDataset",
    ),
    (
        (".bin",),
        "that say nothing of what they are: of tokens, give --tokens (of a sample) and --dtype; --format objects takes"
        " each for a sample",
    ),
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
        return await _planned(FORMATS[name], listing, source, options)
    for each in FORMATS.values():
        if each.found(listing, options):
            found = await _planned(each, listing, source, options)
            if each.NAME == objects.NAME:
                _refuse_lone_index(listing)
            return found
    nothing = f"{listing.url} holds no .tar, and nothing else that refill reads where it lies"
    if not listing.objects:
        hidden = len(listing.all)
        raise EmptyDataset(f"{nothing}: " + (f"all {hidden:,} files are {HIDDEN}" if hidden else "it is empty"))
    for endings, why in _REFUSED:
        if those := listing.named(*endings):
            raise EmptyDataset(f"{nothing}, but {len(those):,} {why}")
    raise EmptyDataset(nothing)


def _refuse_lone_index(listing: Listing) -> None:
    """What names shards would be taken for a sample: where they were deleted, or lie elsewhere."""
    for found in listing.named(INDEX_JSON):
        if found.key.rpartition("/")[2] == INDEX_JSON:
            raise EmptyDataset(
                f"{listing.url}/{found.key} has the name of the file that names the shards of MDS and of LitData, and "
                f"none of them lies there: put both into one folder. --format {objects.NAME} takes it for a sample"
            )


async def _planned(format_: Format, listing: Listing, source: Source, options: Options) -> tuple[Format, Plan]:
    if format_.NAME not in _OF_TOKENS:
        refuse_options(format_.NAME, options)
    if options.columns is not None and format_.NAME not in TABLES:
        raise InvalidInput(f"--columns is for tables ({', '.join(TABLES)}), and this is read as {format_.NAME}")
    if options.windows is not None and format_.NAME not in (*TABLES, webdataset.NAME):
        raise InvalidInput(
            f"--windows is for tables ({', '.join(TABLES)}) and {webdataset.NAME}, and this is read as {format_.NAME}"
        )
    if options.allow_pickle and format_.NAME not in _WITH_PICKLES:
        raise InvalidInput(f"--allow-pickle is for {' and '.join(_WITH_PICKLES)}, and this is read as {format_.NAME}")
    return format_, await format_.plan(listing, source, options)
