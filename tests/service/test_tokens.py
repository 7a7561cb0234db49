"""Which tokens are taken, whose they are, and what happens while a Secret is replaced."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from refill.errors import InvalidInput
from refill.pods.credentials import ShownToken
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
    tokens = Tokens(tmp_path, 300)
    assert [tokens.holder_of(token) for token in (OLD, NEW, OTHER)] == ["vision", "vision", "speech"]
    for wrong in (b"", b"old", OLD + b"0", OLD[:-1], OLD.upper()):
        assert tokens.holder_of(wrong) is None


def test_teams_can_not_have_one_token(tmp_path: Path) -> None:
    """One of them would have neither jobs nor a share of its own."""
    for team in ("speech", "vision"):
        (tmp_path / team).write_text("0123456789abcdef\n")
    with pytest.raises(InvalidInput, match=r"vision has a token that is in .*/speech, too: each team needs"):
        Tokens(tmp_path, 300)


def test_a_replaced_token_is_taken_for_five_minutes_more(tmp_path: Path, clock: list[float]) -> None:
    file = tmp_path / "tokens"
    file.write_bytes(OLD)
    tokens = Tokens(file, 300)
    file.write_bytes(NEW)
    assert tokens.holder_of(NEW) is None  # it does not look at the file for each request
    clock[0] += 3
    assert (tokens.holder_of(NEW), tokens.holder_of(OLD)) == ("", "")
    clock[0] += 299
    assert tokens.holder_of(OLD) == ""
    clock[0] += 2
    assert tokens.holder_of(OLD) is None
    assert tokens.holder_of(NEW) == ""


@pytest.mark.parametrize("content", [b"", b"\n", b"short\n", b"two words 0123456789", None])
def test_a_file_that_goes_wrong_later_shuts_out_whoever_is_in_it_no_more(
    tmp_path: Path, clock: list[float], content: bytes | None
) -> None:
    """As a token that was replaced: what is being written shuts nobody out, and what stays wrong does."""
    wrong, right = tmp_path / "wrong", tmp_path / "right"
    wrong.write_bytes(OLD)
    right.write_bytes(OTHER)
    tokens = Tokens(tmp_path, 300)
    if content is None:
        wrong.unlink()
        wrong.mkdir()  # can't be read
    else:
        wrong.write_bytes(content)
    right.write_bytes(NEW)
    clock[0] += 3
    assert (tokens.holder_of(OLD), tokens.holder_of(NEW)) == ("wrong", "right")
    clock[0] += 301
    assert (tokens.holder_of(OLD), tokens.holder_of(NEW)) == (None, "right")
    with pytest.raises(InvalidInput):
        Tokens(wrong, 300)


def test_what_is_right_in_a_damaged_file_counts(tmp_path: Path, clock: list[float]) -> None:
    file = tmp_path / "tokens"
    file.write_bytes(OLD)
    tokens = Tokens(file, 0)
    file.write_bytes(b"short\n" + NEW)
    clock[0] += 3
    assert (tokens.holder_of(OLD), tokens.holder_of(NEW)) == (None, "")


def test_a_folder_that_is_gone_holds_no_token(tmp_path: Path, clock: list[float]) -> None:
    (tmp_path / "tokens").mkdir()
    (tmp_path / "tokens" / "vision").write_bytes(OLD)
    tokens = Tokens(tmp_path / "tokens", 0)
    (tmp_path / "tokens" / "vision").unlink()
    (tmp_path / "tokens").rmdir()
    clock[0] += 3
    assert tokens.holder_of(OLD) is None


def test_what_is_shown_changes_when_those_who_check_know_the_new_token(tmp_path: Path, clock: list[float]) -> None:
    """Files of pods are replaced up to two minutes before or after the client's."""
    file = tmp_path / "tokens"
    file.write_bytes(OLD)
    shown, checked = ShownToken(file), Tokens(file, 300)
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


def test_a_token_that_is_refused_gives_way_to_a_newer_one_at_once(tmp_path: Path, clock: list[float]) -> None:
    """Those who check may take the old one for less time than it is shown (token_overlap_seconds)."""
    file = tmp_path / "tokens"
    file.write_bytes(OLD)
    shown = ShownToken(file)
    assert not shown.was_refused(OLD.decode())
    assert shown.text() == OLD.decode()
    file.write_bytes(NEW)
    for _ in range(2):
        assert shown.was_refused(OLD.decode()), "another request was on its way, too"
    assert shown.text() == NEW.decode()
    assert not shown.was_refused(NEW.decode()), "there is no newer one: it is not shown again and again"
    clock[0] += 200
    assert shown.text() == NEW.decode()
