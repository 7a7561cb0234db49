"""What may a dataset make a training process run or allocate? Nothing and little, with the standard decoders."""

from __future__ import annotations

import io
import os
import struct
import subprocess
import sys
import zipfile
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from refill.errors import SampleDamaged
from refill.formats.decoders import decode_member, make_decode

EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n%%EndComments\n(/etc/passwd) (r) file\nshowpage\n%%EOF\n"
EXTENSIONS = ["jpg", "jpeg", "png", "webp", "bmp", "gif", "tif", "tiff", "ppm", "pgm", "pbm", "pnm"]
NO_FORMATS = ["EPS", "PDF", "ICO", "TGA", "PCX", "SGI", "ICNS", "JPEG2000", "DDS"]


def decoded(extension: str, data: bytes) -> object:
    decode = make_decode(True)
    assert decode is not None
    return decode_member(decode, extension, data, 17, "d/a")


def png_of(width: int, height: int) -> bytes:
    """A black picture of one bit a pixel: a thousand pixels a byte."""
    compressor = zlib.compressobj(9)
    row = bytes(1 + -(-width // 8))
    rows = b"".join(compressor.compress(row) for _ in range(height)) + compressor.flush()
    parts = [(b"IHDR", struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)), (b"IDAT", rows), (b"IEND", b"")]
    chunks = (
        struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body)) for kind, body in parts
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


def image_of(format: str) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (16, 16)).save(buffer, format)
    return buffer.getvalue()


def test_ghostscript_is_never_run(tmp_path: Path) -> None:
    """A program of that name notes down that it was started, as the real one would run what the sample holds."""
    ghostscript, started = tmp_path / "gs", tmp_path / "started"
    ghostscript.write_text(f"#!/bin/sh\ntouch {started}\n")
    ghostscript.chmod(0o755)
    program = f"""
from refill.formats.decoders import decode_member, make_decode
from refill.errors import SampleDamaged
for extension in {EXTENSIONS}:
    try:
        decode_member(make_decode(True), extension, {EPS!r}, 17, "d/a")
    except SampleDamaged:
        print("refused")
"""
    path = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    run = subprocess.run([sys.executable, "-c", program], env=os.environ | path, capture_output=True, text=True)
    assert run.stdout == "refused\n" * len(EXTENSIONS), run.stderr
    assert not started.exists()


@pytest.mark.parametrize("format", NO_FORMATS)
def test_formats_that_the_table_does_not_name_are_refused(format: str) -> None:
    with pytest.raises(SampleDamaged, match="cannot identify image file"):
        decoded("jpg", image_of(format))


@pytest.mark.parametrize("format", ["JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF", "PPM", "MPO"])
@pytest.mark.parametrize("extension", ["jpg", "tiff"])
def test_those_that_it_names_are_known_by_their_content(format: str, extension: str) -> None:
    """One of ImageNet's .JPEG files is a PNG; those of many cameras hold several pictures (MPO)."""
    image = decoded(extension, image_of(format))
    assert isinstance(image, np.ndarray)
    assert image.shape == (16, 16, 3)


@pytest.mark.parametrize("side", [12_000, 30_000])
def test_pixels_are_bounded_before_they_are_made(side: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a training script has lifted Pillow's own bound, as many do."""
    data = png_of(side, side)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", None)
    with pytest.raises(SampleDamaged, match=rf"{side} x {side} are more than 134217728 pixels"):
        decoded("png", data)


def test_an_array_is_no_archive() -> None:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a.npy", bytes(1_000_000))
    with pytest.raises(SampleDamaged):
        decoded("npy", packed.getvalue())
