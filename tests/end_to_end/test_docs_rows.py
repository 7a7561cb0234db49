"""Is every row of the tables of errors produced by a test that does what the row says?"""

from __future__ import annotations

import re

import pytest
from tests.end_to_end.doc_pages import ROOT

ROWS = {
    "TROUBLESHOOTING.md": {
        "`rank R has waited 3 s for ..., which has not taken its job yet, ...: ... Connection refused` (a warning)": [
            "client/test_wrong_urls.py::test_it_is_said_after_three_seconds_and_then_every_ten",
            "membership/test_said_errors.py::test_no_pod_listens_there",
        ],
        "`memory too small: job ... wants ... and pod ... has ... free`": [
            "membership/test_planned_memory.py::test_who_finds_too_little_is_told"
        ],
        "`job ... has memory for ... chunks of ... samples on pod ..., and below ... the shuffle suffers: ...` (a warning)": [  # noqa: E501
            "membership/test_planned_memory.py::test_who_finds_too_little_is_told"
        ],
        "`memory too small: ... its largest chunk ...`": ["membership/test_said_errors.py::test_a_chunk_does_not_fit"],
        "`job ... was registered before with other settings`": [
            "membership/test_said_errors.py::test_the_name_is_in_use_with_other_settings"
        ],
        "`DatasetNotFound`": ["membership/test_said_errors.py::test_there_is_no_index"],
        "`... is not the object that was indexed: it has another ETag`": [
            "formats/test_first_read.py::test_a_copy_with_its_index_says_what_to_do"
        ],
        "`StoreDenied`": ["membership/test_said_errors.py::test_pods_may_not_read_it"],
        "`the pod takes only requests with a token that it knows`": [
            "integration/test_access.py::test_without_a_token_that_the_pod_knows"
        ],
        "`certificate verify failed`": [
            "integration/test_access.py::test_a_client_does_not_talk_to_a_pod_that_it_does_not_trust"
        ],
        "`rank R gives up on ... after 300 s: pod P ... does not answer` (`PodUnreachable`)": [
            "client/test_pod_connection.py::test_the_last_error_is_one_line_that_names_the_pod",
            "integration/test_faults.py::test_a_killed_pod_is_named_after_the_timeout",
        ],
        "`rank R gives up on ...: can't connect to ADDRESS: timed out after 2 s`": [
            "integration/test_lost_machines.py::test_a_network_that_is_cut_is_named_with_the_address"
        ],
        "`rank R gives up on ...: the name NAME is still being looked up after 2 s: does DNS answer?`": [
            "client/test_name_lookup.py::test_a_rank_says_which_name_it_waited_for"
        ],
        "`PodBusy`, `PodStopping`": [
            "integration/test_slow_clients.py::test_who_finds_no_room_is_told_in_time_and_has_taken_nothing",
            "integration/test_termination.py::test_a_client_that_loops_sees_nothing_but_errors_that_are_tried_again",
        ],
        "`StoreUnavailable: ... pod P waits for the store: nothing has come from ... for 10 s`": [
            "integration/test_last_error.py::test_a_store_that_hangs_is_blamed"
        ],
        "`JobLost`": ["membership/test_live_jobs.py::test_a_pod_that_was_restarted_has_ended_the_job"],
        "`RankTaken: process P on HOST calls itself rank R ..., and process Q on HOST has been that rank since ...`": [
            "integration/test_twins.py::test_a_twin_is_refused_by_name_and_the_first_goes_on"
        ],
        "`rank R has waited 0 s for ...: rank R of job ... is process Q on HOST, heard 2 s ago` (`RankHeld`, in the log)": [  # noqa: E501
            "membership/test_said_errors.py::test_the_rank_was_another_process_a_moment_ago"
        ],
        "`JobConflict`": ["membership/test_said_errors.py::test_the_name_is_in_use_with_other_settings"],
        "`EpochEnded`": ["integration/test_exactly_once.py::test_leaving_an_epoch_early"],
        "`... asks for epoch ... while job ... is in epoch ...`": [
            "membership/test_said_errors.py::test_a_number_of_steps_is_no_epoch"
        ],
        "`EpochNotReady: ... waits for rank R`": [
            "integration/test_last_error.py::test_a_rank_that_never_shows_up_is_named"
        ],
        "`a batch can't be made of samples of several shapes`, or PyTorch's `Trying to resize storage that is not resizable`": [  # noqa: E501
            "client/test_torch_dataset.py::test_photos_of_several_sizes_are_an_error_that_names_two"
        ],
        "`SampleDamaged`": [
            "integration/test_faults.py::test_flipped_bytes_are_named_and_the_rest_comes",
            "client/test_decoders.py::test_bytes_that_can_not_be_decoded_are_named",
        ],
        "`DatasetReplaced`": ["membership/test_replaced_datasets.py::test_other_blobs_in_mid_epoch"],
    },
}
"""What a row begins with -> tests that do what it says, below ``tests/``."""
_HEADS = {
    "TROUBLESHOOTING.md": ["| the error says |", "| the error or the log says |"],
}


@pytest.mark.parametrize("page", ROWS)
def test_each_row_has_a_test(page: str) -> None:
    rows = rows_of(page)
    assert rows == list(ROWS[page]), "a row without a test, or a test without a row"


@pytest.mark.parametrize("page", ROWS)
def test_these_tests_are_there_and_their_files_name_the_error(page: str) -> None:
    for row, tests in ROWS[page].items():
        files = "".join(file_of(test) for test in tests)
        for name in re.findall(r"`([A-Z][a-z]+[A-Z][A-Za-z]+)", row):
            assert name in files, f"{tests} of row {row} never name {name}"


def rows_of(page: str) -> list[str]:
    """The first column of its tables of errors."""
    found: list[str] = []
    lines = (ROOT / "docs" / page).read_text().splitlines()
    for place, line in enumerate(lines):
        if any(line.startswith(head) for head in _HEADS[page]):
            for row in lines[place + 2 :]:
                if not row.startswith("|"):
                    break
                found.append(row.split(" | ")[0].removeprefix("| "))
    return found


def file_of(test: str) -> str:
    """The text of a test's file."""
    path, _, name = test.partition("::")
    text = (ROOT / "tests" / path).read_text()
    assert re.search(rf"^(?:async )?def {name}\(", text, re.MULTILINE), f"there is no test {test}"
    return text
