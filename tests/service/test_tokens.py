"""Which tokens are taken, whose they are, and what happens while a Secret is replaced."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from refill.credentials import ShownToken
from refill.errors import InvalidInput
from refill_service.serving.tokens import Tokens

OLD, NEW, OTHER = b"old-0123456789abcdef", b"new-0123456789abcdef", b"other-0123456789abcdef"


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


def test_a_folder_has_a_file_for_each_holder(tmp_path: Path) -> None:
    versions = tmp_path / "..2026_11_21"
    versions.mkdir()
    (versions / "vision").write_bytes(OLD + b"\n\n" + NEW + b"\n")
    (versions / "speech").write_bytes(OTHER)
    for name in ("vision", "speech"):
        (tmp_path / name).symlink_to(versions / name)  # as Kubernetes mounts a Secret
    tokens = Tokens(tmp_path)
    assert [tokens.holder_of(token) for token in (OLD, NEW, OTHER)] == ["vision", "vision", "speech"]
    for wrong in (b"", b"old", OLD + b"0", OLD[:-1], OLD.upper()):
        assert tokens.holder_of(wrong) is None


def test_a_replaced_token_is_taken_for_five_minutes_more(tmp_path: Path, clock: list[float]) -> None:
    file = tmp_path / "tokens"
    file.write_bytes(OLD)
    tokens = Tokens(file)
    file.write_bytes(NEW)
    assert tokens.holder_of(NEW) is None  # it does not look at the file for each request
    clock[0] += 3
    assert (tokens.holder_of(NEW), tokens.holder_of(OLD)) == ("", "")
    clock[0] += 299
    assert tokens.holder_of(OLD) == ""
    clock[0] += 2
    assert tokens.holder_of(OLD) is None
    assert tokens.holder_of(NEW) == ""


@pytest.mark.parametrize("content", [b"", b"\n", b"short\n", b"two words 0123456789"])
def test_a_file_that_goes_wrong_later_shuts_nobody_out(tmp_path: Path, clock: list[float], content: bytes) -> None:
    file = tmp_path / "tokens"
    file.write_bytes(OLD)
    tokens = Tokens(file)
    file.write_bytes(content)
    clock[0] += 1000
    assert tokens.holder_of(OLD) == ""
    with pytest.raises(InvalidInput):
        Tokens(file)


def test_what_is_shown_changes_when_those_who_check_know_the_new_token(tmp_path: Path, clock: list[float]) -> None:
    """Files of pods are replaced up to two minutes before or after the client's."""
    file = tmp_path / "tokens"
    file.write_bytes(OLD)
    shown, checked = ShownToken(file), Tokens(file)
    file.write_bytes(NEW + b"\n" + OLD)
    clock[0] += 3
    assert shown.text() == OLD.decode()
    clock[0] += 119
    assert shown.text() == OLD.decode()
    clock[0] += 3
    assert shown.text() == NEW.decode()
    assert checked.holder_of(shown.text().encode()) == ""
    assert OLD.decode() not in repr(shown)
    assert NEW.decode() not in repr(shown)
