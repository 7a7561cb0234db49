"""What `refill analyze --part` says of a part agrees with sums done by hand."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from refill.errors import InvalidInput
from refill.protocol.part_choice import in_fraction
from refill_service.cli import main
from refill_service.planning.analysis import Analysis, DatasetShape
from refill_service.planning.part_reads import PartReads, part_reads


def analysis_of(num_samples: int = 20_000, **settings: int) -> Analysis:
    lengths = np.random.default_rng(1).integers(100, 1000, num_samples)
    first_sample = np.array([0, num_samples // 3, num_samples])
    shape = DatasetShape(num_samples, int(lengths.sum()), first_sample, lengths)
    return Analysis(shape, shape.total_bytes // 4, **settings)


def spans_bytes(analysis: Analysis, ids: np.ndarray, chunk_size: int) -> tuple[int, int]:
    """``(chunks, bytes)`` from the first to the last wanted sample of each chunk; chunks begin anew in each blob."""
    lengths, starts = analysis.shape.lengths, analysis.shape.first_sample
    blob = np.searchsorted(starts, ids, side="right") - 1
    chunk = blob * 1_000_000 + (ids - starts[blob]) // chunk_size
    spans = [ids[chunk == each] for each in np.unique(chunk)]
    return len(spans), sum(int(lengths[span[0] : span[-1] + 1].sum()) for span in spans)


@pytest.mark.parametrize("num_pods", [1, 3])
@pytest.mark.parametrize("fraction", [0.01, 0.1, 0.6])
def test_each_chunk_is_read_once_from_its_first_to_its_last_wanted_sample(fraction: float, num_pods: int) -> None:
    analysis = analysis_of(num_pods=num_pods)
    ids = np.arange(20_000)
    ids = ids[in_fraction(ids, fraction)]
    found = part_reads(analysis, ids, 16)
    gets, num_bytes = spans_bytes(analysis, ids, 16)
    assert (found.samples, found.part_bytes) == (len(ids), int(analysis.shape.lengths[ids].sum()))
    assert gets <= found.gets <= 1.03 * gets
    assert num_bytes <= found.bytes_read <= 1.03 * num_bytes


def test_a_range_reads_its_own_bytes_and_is_never_worth_packing() -> None:
    found = part_reads(analysis_of(), np.arange(1600, 4800), 16)
    assert found.amplification == pytest.approx(1, abs=0.01)
    assert found.epochs_until_packed_is_less > 50


@given(st.integers(1, 1000), st.integers(0, 1000))
def test_packing_pays_from_the_first_number_of_epochs_for_which_less_is_read(part: int, more: int) -> None:
    least = PartReads(8, 1, part, 1, part + more).epochs_until_packed_is_less

    def saves(epochs: int) -> bool:
        return part + more + epochs * part < epochs * (part + more)

    if more == 0:
        assert least == float("inf")
    else:
        assert saves(int(least))
        assert not saves(int(least) - 1)


def test_the_command_says_it_of_a_fraction_and_of_ids(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    np.save(tmp_path / "ids.npy", np.arange(0, 4000, 7))
    for part, samples in (("0.1", 3_000), (str(tmp_path / "ids.npy"), 572)):
        arguments = ["analyze", "--samples", "30000", "--part", part, "--chunk-sizes", "8,64"]
        assert main([*arguments, "--json"]) == 0
        rows = json.loads(capsys.readouterr().out)["rows"]
        assert [row["chunk_size"] for row in rows] == [8, 64]
        assert rows[0]["samples"] == pytest.approx(samples, rel=0.05)
        assert rows[0]["bytes_read"] < rows[1]["bytes_read"]
        assert main(arguments) == 0
        assert "pack from epochs" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("part", "said"),
    [("nowhere.npy", "can't be read"), ("2", "--part must be a number from 0 to 1"), ("x", "must be a number")],
)
def test_what_is_no_part_is_refused(part: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["analyze", "--samples", "3000", "--part", part]) == 2
    assert said in capsys.readouterr().err
    with pytest.raises(InvalidInput, match="none of the 20,000 samples"):
        part_reads(analysis_of(), np.array([20_001]), 16)
