"""What are the bytes of one sample, in each format that a dataset may lie in? Each module here is one parser.

The index of a dataset says in its metadata which format it is, and what its parser needs to know
(``refill_service/formats`` has the other half, which finds samples).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from refill.errors import InvalidInput
from refill.formats import arrayrecord, jsonl, litdata, mds, objects, rows, tar_windows, tfrecord, tokens, zip
from refill.formats.parsed import Parser
from refill.formats.tar_samples import parse_members

__all__ = ["parser_of"]

_PARSERS = {
    "mds": mds.make_parser,
    "tokens": tokens.make_parser,
    "megatron": tokens.make_parser,
    "tfrecord": tfrecord.make_parser,
    "arrayrecord": arrayrecord.make_parser,
    "jsonl": jsonl.make_parser,
    "objects": objects.make_parser,
    "litdata": litdata.make_parser,
    "parquet": rows.make_parser,
    "arrow": rows.make_parser,
    "lerobot": rows.make_parser,
    "zip": zip.make_parser,
    "webdataset": tar_windows.make_parser,
}


def parser_of(metadata: Mapping[str, Any], labels: Callable[[], Any] = lambda: None) -> Parser:
    """Of a dataset with this metadata. Without a format it is tars.

    :param labels: by id, where samples themselves do not hold them.

    Raises :class:`InvalidInput` for a format that is unknown here, or is described in an unknown way.
    """
    about = metadata.get("format")
    if about is None:
        return parse_members
    name = about.get("name") if isinstance(about, dict) else None
    if not isinstance(name, str) or name not in _PARSERS:
        raise InvalidInput(
            f"the dataset has a format {str(name)[:60]!r} that this refill does not know (it knows "
            f"{', '.join(_PARSERS)}): install the version of refill that the index was written with"
        )
    try:
        parser = _PARSERS[name](about)
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        raise InvalidInput(f"the index describes its format {name} in an unknown way: {str(error)[:200]}") from error
    return _with_labels(parser, labels) if about.get("classes") is True else parser


def _with_labels(parser: Parser, labels: Callable[[], Any]) -> Parser:
    def parse(data: memoryview, sample_id: int) -> tuple[str, dict[str, Any]]:
        key, fields = parser(data, sample_id)
        found = labels()
        return key, fields if found is None else fields | {"cls": int(found[sample_id])}

    return parse
