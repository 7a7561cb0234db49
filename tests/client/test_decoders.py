"""What members become: standard decoders, a caller's own, and what is said of bytes that can't be decoded."""

from __future__ import annotations

import io
import pickle
import struct
import sys
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from refill.errors import InvalidInput, SampleDamaged
from refill.formats.decoders import Decode, decode_member, make_decode


def image_bytes(mode: str, format: str = "png") -> bytes:
    buffer = io.BytesIO()
    Image.new(mode, (5, 3)).save(buffer, format)
    return buffer.getvalue()


def npy_bytes(value: Any, pickled: bool = False) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, value, allow_pickle=pickled)
    return buffer.getvalue()


def decoded(decode: Decode, extension: str, data: bytes) -> Any:
    function = make_decode(decode)
    assert function is not None
    return decode_member(function, extension, data, 17, "d/a")


@pytest.mark.parametrize(
    ("mode", "shape", "kind"),
    [
        ("RGB", (3, 5, 3), np.uint8),
        ("RGBA", (3, 5, 3), np.uint8),
        ("P", (3, 5, 3), np.uint8),
        ("L", (3, 5), np.uint8),
        ("LA", (3, 5), np.uint8),
        ("1", (3, 5), np.uint8),
        ("I;16", (3, 5), np.uint16),
    ],
)
def test_images_become_arrays(mode: str, shape: tuple[int, ...], kind: type) -> None:
    image = decoded(True, "png", image_bytes(mode))
    assert (image.shape, image.dtype, image.flags.writeable) == (shape, kind, True)


@pytest.mark.parametrize(("kind", "channels"), [(2, 3), (6, 4), (4, 2)], ids=["RGB", "RGBA", "grey and alpha"])
def test_a_png_of_16_bits_a_channel_is_refused_where_they_would_be_lost(kind: int, channels: int) -> None:
    def chunk(name: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))

    head = chunk(b"IHDR", struct.pack(">IIBBBBB", 4, 3, 16, kind, 0, 0, 0))
    pixels = chunk(b"IDAT", zlib.compress(bytes(3 * (1 + 4 * 2 * channels))))
    with pytest.raises(SampleDamaged, match="it is a PNG of 16 bits a channel, of which Pillow keeps 8"):
        decoded(True, "png", b"\x89PNG\r\n\x1a\n" + head + pixels + chunk(b"IEND", b""))


class Runs:
    """Whose pickle makes a file, where it is read."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


@pytest.mark.parametrize("as_zip", [True, False])
def test_what_torch_saved_runs_no_code(tmp_path: Path, as_zip: bool) -> None:
    buffer = io.BytesIO()
    torch.save({"x": torch.arange(3)}, buffer, _use_new_zipfile_serialization=as_zip)
    assert decoded(True, "pt", buffer.getvalue())["x"].tolist() == [0, 1, 2]
    hostile = io.BytesIO()
    torch.save(Runs(tmp_path / "ran"), hostile, _use_new_zipfile_serialization=as_zip)
    with pytest.raises(SampleDamaged, match="can't be decoded"):
        decoded(True, "pth", hostile.getvalue())
    assert not (tmp_path / "ran").exists()
    with pytest.raises(SampleDamaged, match="can't be decoded"):
        decoded(True, "pt", buffer.getvalue()[:-50])


def test_an_earlier_torch_is_not_trusted_with_pickles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.5.1+cpu")
    with pytest.raises(InvalidInput, match=r"needs PyTorch 2\.6"):
        decoded(True, "pt", b"")


@pytest.mark.parametrize(
    ("extension", "data", "value"),
    [
        ("cls", b"7\n", 7),
        ("index", b"-3", -3),
        ("json", b'{"a": [1, null]}', {"a": [1, None]}),
        ("txt", "grüße".encode(), "grüße"),
        ("meta.json", b"1", 1),
        ("bin", b"\0\xff", b"\0\xff"),
        ("", b"x", b"x"),
    ],
)
def test_standard_decoders(extension: str, data: bytes, value: Any) -> None:
    assert decoded("standard", extension, data) == value
    assert make_decode(None) is None


def test_arrays_are_read_but_never_pickles() -> None:
    np.testing.assert_array_equal(decoded(True, "npy", npy_bytes(np.arange(6).reshape(2, 3))), [[0, 1, 2], [3, 4, 5]])
    with pytest.raises(SampleDamaged, match="allow_pickle"):
        decoded(True, "npy", npy_bytes(np.array([{}]), pickled=True))


def test_a_mapping_comes_before_the_standard_and_the_whole_extension_before_its_end() -> None:
    decode = {".PNG": len, "seg.png": lambda data: "mask"}
    assert decoded(decode, "png", b"12") == 2
    assert decoded(decode, "depth.png", b"123") == 3
    assert decoded(decode, "seg.png", b"12") == "mask"
    assert decoded(decode, "cls", b"12") == 12


def test_a_function_gets_every_member() -> None:
    assert decoded(lambda extension, data: (extension, data), "cls", b"1") == ("cls", b"1")


@pytest.mark.parametrize(
    ("extension", "data"), [("jpg", b"no image"), ("cls", b"cat"), ("json", b"{\n\n"), ("npy", b"")]
)
def test_bytes_that_can_not_be_decoded_are_named(extension: str, data: bytes) -> None:
    with pytest.raises(SampleDamaged, match=rf"sample 17 \('d/a'\): its member '{extension}'") as caught:
        decoded(True, extension, data)
    assert "\n" not in str(caught.value)
    assert caught.value.details == {"sample": 17, "key": "d/a", "extension": extension}
    assert caught.value.__cause__ is not None


def test_a_mistake_in_a_decoder_is_no_damage() -> None:
    """Else every sample would be skipped as damaged, or blamed on the dataset."""

    def misspelt(extension: str, data: bytes) -> Any:
        return jsno.loads(data)  # type: ignore[name-defined]  # noqa: F821

    with pytest.raises(NameError, match="jsno") as caught:
        decoded(misspelt, "json", b"{}")
    assert caught.value.__notes__ == ["in the decoder of member 'json' of sample 17 ('d/a')"]


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(InvalidInput, match="pip install pillow"):
        decoded(True, "jpg", b"")


@pytest.mark.parametrize("decode", ["jpg", 3, {"jpg": "pil"}])
def test_what_is_no_decoder_is_refused(decode: Any) -> None:
    with pytest.raises(InvalidInput, match="decode"):
        make_decode(decode)


def test_decoders_go_to_spawned_workers() -> None:
    copy = pickle.loads(pickle.dumps(make_decode({"raw": len})))
    assert copy("raw", b"123") == 3
