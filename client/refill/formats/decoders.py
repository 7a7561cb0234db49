"""What do a sample's bytes mean? Standard decoders by extension; a caller's own come first."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from refill.errors import InvalidInput, RefillError, SampleDamaged

Decoder = Callable[[bytes], Any]
"""The bytes of one member -> its value."""
Decode = bool | str | Mapping[str, Decoder] | Callable[[str, bytes], Any] | None
"""``None`` or ``False``: bytes. ``True`` or ``"standard"``: the table below; members of other extensions stay bytes.
A mapping of extensions: those on top of the standard ones. ``"views"``: :func:`as_view` for all. A callable:
``(extension, bytes) -> value`` for every member. All must be picklable where loader workers are spawned: functions of a
module, no lambdas."""


def make_decode(decode: Decode) -> Callable[[str, bytes], Any] | None:
    """One function ``(extension, bytes) -> value``; None when bytes are to stay as they are."""
    if decode is None or decode is False or decode == "views":
        return None
    if decode is True or decode == "standard":
        return _ByExtension({})
    if isinstance(decode, Mapping):
        for name, decoder in decode.items():
            if not isinstance(name, str):
                raise InvalidInput(f"decode must have names of members, as {{'jpg': function}}, got {name!r:.100}")
            if not callable(decoder):
                raise InvalidInput(f"decode[{name!r}] must be a function of bytes, got {decoder!r}")
        return _ByExtension({name.lower().lstrip("."): decoder for name, decoder in decode.items()})
    if callable(decode):
        return decode
    raise InvalidInput(f"decode must be None, True, 'standard', 'views', a mapping or a callable, got {decode!r}")


def as_view(data: bytes | memoryview) -> NDArray[np.uint8]:
    """For ``decode={"jpg": refill.as_view}``: the bytes of such a member as they came, ``(n,)`` uint8, not copied: a
    view of the buffer that the pod's answer was read into, which stays in memory as long as any view of it. Of
    :class:`CacheDataset` it is a tensor, of :func:`iterate` an array. For what takes the encoded bytes of a whole batch
    at once, such as decoders on a GPU."""
    return np.frombuffer(data, dtype=np.uint8)


def is_viewed(decode: Decode, field: str) -> bool:
    """Whether the bytes of a member or field are given as a view."""
    if not isinstance(decode, Mapping):
        return decode == "views"
    short = field.rpartition(".")[2]
    found = (decode.get(form) for name in (field, short) for form in (name, f".{name}"))
    return next((each for each in found if each is not None), None) is as_view


def decode_member(decode: Callable[[str, bytes], Any], extension: str, data: bytes, sample_id: int, key: str) -> Any:
    """Decode one member.

    Raises :class:`SampleDamaged` (details: ``sample``, ``key``, ``extension``) for whatever the decoder raised,
    which is kept as its cause. Errors of refill itself, such as a missing library, pass as they are, and so do those
    that no data can cause: else a mistake in a decoder would have samples skipped as damaged.
    """
    try:
        return decode(extension, data)
    except RefillError:
        raise
    except (NameError, ImportError) as error:
        error.add_note(f"in the decoder of member {extension!r} of sample {sample_id} ({key!r})")
        raise
    except Exception as error:
        why = " ".join(f"{type(error).__name__}: {error}".split())
        raise SampleDamaged(
            f"sample {sample_id} ({key!r}): its member {extension!r} of {len(data)} bytes can't be decoded: {why}",
            sample=sample_id,
            key=key,
            extension=extension,
        ) from error


def decode_coded(
    decode: Callable[[str, bytes], Any], field: str, kind: str, data: bytes, sample_id: int, key: str
) -> Any:
    """Decode a field whose format is known, whatever it is called. A caller's own decoder for the field comes first;
    one function for every member gets the field's name. Raises as :func:`decode_member`."""
    if isinstance(decode, _ByExtension):
        decode = partial(decode.coded, kind)
    return decode_member(decode, field, data, sample_id, key)


_IMAGE_FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF", "PPM")
"""Pillow's names of what the table below has, whatever a member's extension says: a ``.jpg`` is often a PNG. Others are
not even tried: Pillow would hand EPS to Ghostscript, which runs the program that it is."""
_MOST_PIXELS = 1 << 27
"""400 MB as RGB. A picture of a few KB may have any number of them; larger ones need a decoder of the caller's own."""


class _ByExtension:
    """Picklable, so that loader workers can be spawned. Of ``seg.png`` both ``seg.png`` and ``png`` are looked up."""

    def __init__(self, own: Mapping[str, Decoder]) -> None:
        self._own = dict(own)

    def __call__(self, extension: str, data: bytes) -> Any:
        short = extension.rpartition(".")[2]
        for table in (self._own, STANDARD):
            for name in (extension, short):
                if name in table:
                    return table[name](data)
        return data

    def coded(self, kind: str, field: str, data: bytes) -> Any:
        """Of a field of this kind."""
        own = self._own.get(field.lower())
        return self(kind, data) if own is None else own(data)


def _image(data: bytes) -> NDArray[Any]:
    """A picture: ``(height, width, 3)`` uint8 RGB, or ``(height, width)`` if it is grey; more than 8 bits keep their
    values and type, or, in a PNG with colours, are refused.

    Labels and depths must not be clipped silently.
    """
    try:
        from PIL import Image
    except ModuleNotFoundError as error:
        raise InvalidInput("decoding images needs Pillow: pip install pillow") from error
    with Image.open(io.BytesIO(data), formats=_IMAGE_FORMATS) as image:
        if image.width * image.height > _MOST_PIXELS:
            raise ValueError(
                f"{image.width} x {image.height} are more than {_MOST_PIXELS} pixels: give a decoder of your own"
            )
        if image.mode in ("RGB", "RGBA", "LA") and _is_deep_png(data):
            raise ValueError(
                "it is a PNG of 16 bits a channel, of which Pillow keeps 8 (of grey alone it keeps all): give a "
                "decoder of your own, such as one by OpenCV"
            )
        if image.mode in ("1", "LA"):
            return np.array(image.convert("L"))
        if image.mode in ("L", "RGB", "F") or image.mode.startswith("I"):
            return np.array(image)  # a copy, because torch wants arrays that can be written to
        return np.array(image.convert("RGB"))


def _is_deep_png(data: bytes) -> bool:
    """Of more than 8 bits a channel."""
    return data[:8] == b"\x89PNG\r\n\x1a\n" and data[12:16] == b"IHDR" and data[24] > 8


def _number(data: bytes) -> int:
    """An int."""
    return int(data)


def _text(data: bytes) -> str:
    """Text, UTF-8."""
    return data.decode("utf-8")


def _json(data: bytes) -> Any:
    """What the JSON says."""
    return json.loads(data)


def _npy(data: bytes) -> Any:
    """An array; one of pickled objects is refused."""
    # Not np.load, which also opens zip files; and a pickle in a dataset would run as code.
    return np.lib.format.read_array(io.BytesIO(data), allow_pickle=False)


def _torch(data: bytes) -> Any:
    """Tensors, numbers, text, lists and dicts of ``torch.save`` (PyTorch 2.6); other objects are refused."""
    try:
        import torch
    except ModuleNotFoundError as error:
        raise InvalidInput("decoding .pt needs PyTorch: pip install 'refill-cache[torch]'") from error
    if tuple(int(each) for each in torch.__version__.split(".")[:2]) < _SAFE_TORCH:
        raise InvalidInput(f"decoding .pt needs PyTorch 2.6: pickles could run as code in {torch.__version__}")
    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)


_SAFE_TORCH = (2, 6)
"""Before, files of the old form got around ``weights_only`` (CVE-2025-32434)."""

STANDARD: dict[str, Decoder] = {
    **dict.fromkeys(("jpg", "jpeg", "png", "webp", "bmp", "gif", "tif", "tiff", "ppm", "pgm", "pbm", "pnm"), _image),
    **dict.fromkeys(("cls", "cls2", "class", "count", "index", "inx", "id"), _number),
    **dict.fromkeys(("txt", "text", "transcript"), _text),
    **dict.fromkeys(("json", "jsn"), _json),
    "npy": _npy,
    **dict.fromkeys(("pt", "pth"), _torch),
}
