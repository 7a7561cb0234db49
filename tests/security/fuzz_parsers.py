"""``python -m tests.security.fuzz_parsers NAME [-max_total_time=60]``: searches, by coverage, for bytes that have a
parser raise what is no error of ours. Options are libFuzzer's. It needs ``pip install atheris``.

What it ends with is written to the folder FOUND of the environment, else to the one that it runs in: put it into
``corpus/NAME`` when it is mended.
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
    name, *options = sys.argv[1:]
    parser = PARSERS[name]

    def once(data: bytes) -> None:
        if (error := foreign(parser, data)) is not None:
            raise error

    with tempfile.TemporaryDirectory() as corpus:
        for number, data in enumerate(parser.inputs(name)):
            (Path(corpus) / str(number)).write_bytes(data)
        where = os.environ.get("FOUND", ".")
        atheris.Setup([sys.argv[0], f"-artifact_prefix={where}/", "-verbosity=0", *options, corpus], once)
        atheris.Fuzz()


if __name__ == "__main__":
    main()
