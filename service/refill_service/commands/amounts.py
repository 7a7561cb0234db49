"""How do people write amounts on a command line? Sizes, parts of a dataset, numbers with bounds.

Raises :class:`InvalidInput`, or what argparse shows, with one line that names the option."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable

from refill.errors import InvalidInput
from refill.protocol.sizes import parse_bytes


def memory_bytes_of(option: str, given: str, total_bytes: int) -> int:
    text = given.strip()
    if not text.endswith("%"):
        return size_of(option, given)
    try:
        percent = float(text[:-1])
    except ValueError:
        percent = math.nan
    if not 0 < percent <= 100:
        raise InvalidInput(f"{option} {given!r} is not a part of the dataset; write for example 10% or 64GiB")
    return max(1, int(total_bytes * percent / 100))


def size_of(option: str, given: str) -> int:
    try:
        found = int(parse_bytes(given))
    except ValueError as error:
        raise InvalidInput(f"{option}: {error}") from error
    if found < 1:
        raise InvalidInput(f"{option} must be at least 1 byte, got {given!r}")
    return found


def size(least: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        try:
            found = int(parse_bytes(text))
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None
        if found < least:
            raise argparse.ArgumentTypeError(f"must be at least {least}, got {text}")
        return found

    return parse


def whole(least: int, most: int = 2**62) -> Callable[[str], int]:
    def parse(text: str) -> int:
        try:
            value = int(float(text)) if "e" in text.lower() and float(text).is_integer() else int(text)
        except (ValueError, OverflowError):
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
        if not least <= value <= most:
            bound = f"at least {least}" if value < least else f"at most {most}"
            raise argparse.ArgumentTypeError(f"must be {bound}, got {text}")
        return value

    return parse


def wholes(text: str) -> list[int]:
    return sorted({whole(1)(part) for part in text.split(",")})


def number(least: float) -> Callable[[str], float]:
    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
        if not least <= value < math.inf:
            raise argparse.ArgumentTypeError(f"must be at least {least:g}, got {text}")
        return value

    return parse
