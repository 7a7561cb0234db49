"""The command ``refill``: which subcommand, and what do its errors look like?"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from refill.errors import RefillError
from refill_service.datasets.commands import add_commands

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="refill", description="A data cache for model training.")
    add_commands(parser.add_subparsers(title="commands", required=True, metavar="COMMAND"))
    arguments = parser.parse_args(argv)
    try:
        status: int = arguments.func(arguments)
        return status
    except RefillError as error:
        print(f"refill: {error.message}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("refill: broken off", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
