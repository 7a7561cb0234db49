"""``python -m tests.security.fuzz_parsers [NAME ...] [-max_total_time=60]``: searches, by coverage, for bytes that have
a parser, any or one of these, raise what is no error of ours. Options are libFuzzer's. ``pip install atheris`` first.

What it ends with is written to the folder FOUND of the environment, else to the one that it runs in. The error names
the parser: put all but the first byte, which chooses it, into ``corpus/NAME`` when it is mended.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["refill", "refill_service", "json"]):
    from tests.security.parsers import PARSERS, foreign


def main() -> None:
    options = [each for each in sys.argv[1:] if each.startswith("-")]
    names = [each for each in sys.argv[1:] if not each.startswith("-")] or list(PARSERS)

    def once(data: bytes) -> None:
        name = names[data[0] % len(names)] if data else names[0]
        if (error := foreign(PARSERS[name], data[1:])) is not None:
            raise AssertionError(f"{name}: {data[1:]!r}: {error!r}") from error

    with tempfile.TemporaryDirectory() as corpus:
        for place, name in enumerate(names):
            for number, data in enumerate(PARSERS[name].inputs(name)):
                (Path(corpus) / f"{name}-{number}").write_bytes(bytes([place]) + data)
        where = os.environ.get("FOUND", ".")
        atheris.Setup([sys.argv[0], f"-artifact_prefix={where}/", "-verbosity=0", *options, corpus], once)
        atheris.Fuzz()


if __name__ == "__main__":
    main()
