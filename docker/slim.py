"""Which files of the locked packages does nothing in the image ever read? They are left out of it.

    python docker/slim.py SITE_PACKAGES     remove them there, and say how much that was

What goes is named here, not found out: a file that is not named stays, so that a new version of a package brings too
much rather than too little. Licences stay, and what lists the packages (``*.dist-info``). Of libraries go the symbols
and debugging information, as distributions do it: 12 MB of uvloop's 14 are that.
"""

from __future__ import annotations

import os
import re
import struct
import sys
from pathlib import Path

__all__ = ["main", "unread", "without_symbols"]

_UNREAD = re.compile(
    "|".join(
        (
            r".*/tests/.*",
            # For those who write programs: types, and what extensions are compiled against, in Cython, C and Fortran.
            r".*\.(pyi|pyx|pxd|pxi|a)",
            r"boto3/examples/.*",
            r"numpy/_core/include/.*",
            r"numpy/(distutils|f2py)/.*",
            # Of AWS stay the services that botocore's credentials come from, and the store itself, for whoever looks at
            # it from within a pod.
            r"botocore/data/(?!(s3|signin|sso|sso-oidc|sts)/)[^/]+/.*",
            # Of Arrow stay what reads Parquet and Arrow, and what that imports.
            r"pyarrow/(include|src|tests)/.*",
            r"pyarrow/(libarrow_flight|libarrow_python_flight|_flight|libarrow_s3|_s3fs)\..*",
            # rich asks for the names of languages, and nothing here is coloured by their grammar.
            r"pygments/lexers/(?!__init__|_mapping)[^/]+\.py",
        )
    )
)

_ELF64 = b"\x7fELF\x02\x01"
"""Of 64 bits, little-endian: amd64 and arm64."""


def main(packages: Path) -> None:
    before = after = 0
    for folder, _, names in os.walk(packages, topdown=False):
        for path in (Path(folder, name) for name in names):
            before += path.stat().st_size
            if unread(os.path.relpath(path, packages)):
                path.unlink()
                continue
            if ".so" in path.suffixes and (loaded := without_symbols(whole := path.read_bytes())) != whole:
                _put_in_place(path, loaded)
            after += path.stat().st_size
        if not os.listdir(folder):
            os.rmdir(folder)
    print(f"{packages}: {before / 1e6:.0f} MB, of which {(before - after) / 1e6:.0f} MB are left out")


def unread(path: str) -> bool:
    """:param path: of a file, from the folder of the packages."""
    return _UNREAD.fullmatch(path) is not None


def without_symbols(library: bytes) -> bytes:
    """What is loaded of it: all that the program headers name. After that come, for linkers and debuggers, sections."""
    if not library.startswith(_ELF64):
        return library
    at, size, count = *struct.unpack_from("<Q", library, 32), *struct.unpack_from("<HH", library, 54)
    end = at + size * count
    for header in range(at, at + size * count, size):
        (offset,), (num_bytes,) = (struct.unpack_from("<Q", library, header + each) for each in (8, 32))
        end = max(end, offset + num_bytes)
    loaded = bytearray(library[:end])
    loaded[40:48] = bytes(8)  # where the table of sections is: nowhere,
    loaded[58:64] = bytes(6)  # the size of an entry, how many, and which one has the names
    return bytes(loaded)


def _put_in_place(path: Path, content: bytes) -> None:
    """By another file: what is there may be linked from elsewhere."""
    other = path.with_name(f"{path.name}.slim")
    other.write_bytes(content)
    other.chmod(path.stat().st_mode)
    os.replace(other, path)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
