"""What do a sample's bytes mean? Standard decoders by extension; a caller's own come first."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from refill.errors import InvalidInput, RefillError

__all__ = ["Decode", "Decoder", "decode_member", "make_decode"]

Decoder = Callable[[bytes], Any]
"""The bytes of one member -> its value."""
Decode = bool | str | Mapping[str, Decoder] | Callable[[str, bytes], Any] | None
"""``None``: bytes. ``True`` or ``"standard"``: the table below. A mapping of extensions: those on top of the standard
ones. A callable: ``(extension, bytes) -> value`` for every member."""


def make_decode(decode: Decode) -> Callable[[str, bytes], Any] | None:
    """One function ``(extension, bytes) -> value``; None when bytes are to stay as they are."""
    if decode is None or decode is False:
        return None
    if decode is True or decode == "standard":
        return _ByExtension({})
    if isinstance(decode, Mapping):
        return _ByExtension({name.lower().lstrip("."): decoder for name, decoder in decode.items()})
    if callable(decode):
        return decode
    raise InvalidInput(f"decode must be None, True, 'standard', a mapping or a callable, got {decode!r}")


def decode_member(decode: Callable[[str, bytes], Any], extension: str, data: bytes, sample_id: int, key: str) -> Any:
    """Decode one member; an error names sample, key and member, and keeps its cause."""
    try:
        return decode(extension, data)
    except RefillError:
        raise
    except Exception as error:
        raise InvalidInput(
            f"sample {sample_id} ({key}): member .{extension} of {len(data)} bytes can't be decoded: {error}",
            sample=sample_id,
            key=key,
            extension=extension,
        ) from error


class _ByExtension:
    """Picklable, so that loader workers can be spawned. Of ``seg.png`` both ``seg.png`` and ``png`` are looked up."""

    def __init__(self, own: Mapping[str, Decoder]) -> None:
        self._own = dict(own)

    def __call__(self, extension: str, data: bytes) -> Any:
        extension = extension.lower()
        short = extension.rpartition(".")[2]
        for table in (self._own, _STANDARD):
            for name in (extension, short):
                if name in table:
                    return table[name](data)
        return data


def _image(data: bytes) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    """``(height, width, 3)`` uint8, ``(height, width)`` for grey images."""
    try:
        from PIL import Image
    except ModuleNotFoundError as error:
        raise InvalidInput("decoding images needs Pillow: pip install 'refill[torch]'") from error
    with Image.open(io.BytesIO(data)) as image:
        return np.array(image if image.mode in ("L", "RGB") else image.convert("RGB"))


def _number(data: bytes) -> int:
    return int(data)


def _text(data: bytes) -> str:
    return data.decode("utf-8")


def _json(data: bytes) -> Any:
    return json.loads(data)


def _npy(data: bytes) -> Any:
    return np.load(io.BytesIO(data), allow_pickle=False)


_STANDARD: dict[str, Decoder] = {
    **dict.fromkeys(("jpg", "jpeg", "png", "webp", "bmp", "ppm", "pgm"), _image),
    **dict.fromkeys(("cls", "cls2", "index", "inx", "id"), _number),
    **dict.fromkeys(("txt", "text", "transcript"), _text),
    "json": _json,
    "npy": _npy,
}
