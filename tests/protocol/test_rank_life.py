"""How a training process is named on the wire."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from refill.errors import InvalidInput
from refill.protocol.rank_life import LONGEST_LIFE, RankLife, host_for_life


@given(
    st.text(),
    st.integers(0, 2**32 - 1),
    st.integers(0, 2**64 - 1),
    st.text("0123456789abcdef", min_size=0, max_size=32),
)
def test_a_life_comes_back_as_it_was(host: str, process: int, started: int, place: str) -> None:
    life = RankLife(host_for_life(host), process, started, place)
    assert RankLife.decode(life.encode()) == life
    assert len(life.encode()) <= LONGEST_LIFE


@pytest.mark.parametrize("text", ["", "a", "a:1:2", "a:1:2:G", "a b:1:2:", "a:-1:2:", "a\n:1:2:", "a:1:2:\n", "é:1:2:"])
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(InvalidInput, match="names no training process"):
        RankLife.decode(text)


@given(st.text())
def test_no_text_makes_it_fail_otherwise(text: str) -> None:
    with contextlib.suppress(InvalidInput):
        assert RankLife.decode(text).encode()
