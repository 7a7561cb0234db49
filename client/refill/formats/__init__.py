"""What are the bytes of one sample, in each format that a dataset may lie in? Each module here is one parser.

The index of a dataset says in its metadata which format it is, and what its parser needs to know
(``refill_service/formats`` has the other half, which finds samples).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from refill.errors import InvalidInput
from refill.formats import mds, tokens
from refill.formats.parsed import Parser
from refill.tar_samples import parse_members

__all__ = ["parser_of"]

_PARSERS = {"mds": mds.make_parser, "tokens": tokens.make_parser, "megatron": tokens.make_parser}


def parser_of(metadata: Mapping[str, Any]) -> Parser:
    """Of a dataset with this metadata. Without a format it is tars.

    Raises :class:`InvalidInput` for a format that is unknown here, or that is described as none is.
    """
    about = metadata.get("format")
    if about is None:
        return parse_members
    name = about.get("name") if isinstance(about, dict) else None
    if not isinstance(name, str) or name not in _PARSERS:
        raise InvalidInput(
            f"the dataset lies in a format {str(name)[:60]!r} that this refill does not know, and knows "
            f"{', '.join(_PARSERS)}: install the version of refill that the index was written with"
        )
    try:
        return _PARSERS[name](about)
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        raise InvalidInput(f"the index describes its format {name} as none is: {str(error)[:200]}") from error
