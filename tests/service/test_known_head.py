"""Heads that are the same mean the same; whatever differs is left to the parser."""

from __future__ import annotations

from typing import Any

import httptools
from hypothesis import given
from hypothesis import strategies as st

from refill_service.serving.batch_door import KnownHead

NAMES = st.sampled_from(["Host", "Accept-Encoding", "Authorization", "X-Request-Id", "Content-Type"])
VALUES = st.text(st.characters(min_codepoint=33, max_codepoint=126), max_size=12)
HEADERS = st.dictionaries(NAMES, VALUES, max_size=5).map(lambda found: list(found.items()))


class Parsed:
    """What the parser of the server finds."""

    def __init__(self, piece: bytes) -> None:
        self.headers: list[tuple[bytes, bytes]] = []
        self.url = self.body = b""
        self.num_requests = 0
        httptools.HttpRequestParser(self).feed_data(piece)

    def on_url(self, url: bytes) -> None:
        self.url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name.lower(), value))

    def on_body(self, body: bytes) -> None:
        self.body += body

    def on_message_complete(self) -> None:
        self.num_requests += 1

    @property
    def scope(self) -> dict[str, Any]:
        return {"path": self.url, "headers": self.headers}


def request(headers: list[tuple[str, str]], place: int, body: bytes, path: str = "/batch") -> bytes:
    place %= len(headers) + 1
    about = [*headers[:place], ("Content-Length", str(len(body))), *headers[place:]]
    lines = [f"POST {path} HTTP/1.1", *(f"{name}: {value}" for name, value in about), "", ""]
    return "\r\n".join(lines).encode() + body


def known_of(piece: bytes) -> KnownHead | None:
    parsed = Parsed(piece)
    return KnownHead.of(piece, parsed.body, parsed.scope)


@given(HEADERS, st.integers(0, 9), st.binary(min_size=1, max_size=300), st.binary(max_size=300))
def test_the_same_head_is_found_again_with_any_body(
    headers: list[tuple[str, str]], place: int, first: bytes, second: bytes
) -> None:
    known = known_of(request(headers, place, first))
    assert known is not None
    piece = request(headers, place, second)
    found, parsed = known.body_in(piece), Parsed(piece)
    assert found == second == parsed.body
    scope = known.scope(len(second))
    assert (scope["path"], sorted(scope["headers"])) == (parsed.url, sorted(parsed.headers))


@given(HEADERS, st.integers(0, 9), st.binary(min_size=1, max_size=40), st.data())
def test_whatever_else_is_found_is_what_the_parser_finds(
    headers: list[tuple[str, str]], place: int, body: bytes, data: st.DataObject
) -> None:
    """A piece with a byte that is another one, missing, or one too many."""
    piece = request(headers, place, body)
    known = known_of(piece)
    assert known is not None
    at = data.draw(st.integers(0, len(piece) - 1))
    put, taken = data.draw(st.binary(max_size=2)), data.draw(st.integers(0, 2))
    other = piece[:at] + put + piece[at + taken :]
    found = known.body_in(other)
    if found is None:
        return
    parsed = Parsed(other)
    assert (parsed.num_requests, parsed.body) == (1, found)
    scope = known.scope(len(found))
    # The parser passes on leading noughts of a length; it means the same.
    lengths = [int(value) for name, value in parsed.headers if name == b"content-length"]
    assert lengths == [len(found)]
    others = [(name, value) for name, value in parsed.headers if name != b"content-length"]
    assert (scope["path"], [each for each in scope["headers"] if each[0] != b"content-length"]) == (parsed.url, others)


def test_heads_that_say_the_length_in_no_usual_way_are_not_known() -> None:
    body = b"12345678"
    chunked = b"POST /batch HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n8\r\n12345678\r\n0\r\n\r\n"
    spaced = b"POST /batch HTTP/1.1\r\nContent-Length:8\r\n\r\n" + body
    named_so = b"POST /batch HTTP/1.1\r\nX: \tContent-Length: 8\r\nContent-Length:8\r\n\r\n" + body
    assert [known_of(each) for each in (chunked, spaced, named_so)] == [None] * 3


def test_a_piece_with_more_than_one_request_is_not_known() -> None:
    piece = request([("Host", "pod")], 0, b"1234")
    known = known_of(piece)
    assert known is not None
    assert known.body_in(piece + piece) is None
    assert known.body_in(piece[:-1]) is None
    assert KnownHead.of(piece + piece, b"1234", Parsed(piece).scope) is None
