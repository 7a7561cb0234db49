"""Tars that webdataset writes, held against what it reads of them."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from refill_service.cli import main
from refill_service.demo.local_cluster import LocalCluster
from tests.formats import peers
from tests.formats.reading import epoch_of


def test_each_sample_is_what_its_own_reader_has(tmp_path: Path, pod: LocalCluster) -> None:
    webdataset, draws = peers.webdataset(), np.random.default_rng(1)
    for part in range(2):
        with webdataset.TarWriter(str(tmp_path / f"{part}.tar")) as writer:
            for place in range(20):
                key = f"{part}/{place:03}"
                writer.write({"__key__": key, "bin": draws.bytes(100 * place), "cls": place, "json": {"é": [place]}})
    assert main(["index", str(tmp_path), "--quiet"]) == 0
    urls = [str(tmp_path / f"{part}.tar") for part in range(2)]
    theirs = list(webdataset.WebDataset(urls, shardshuffle=False))
    found = epoch_of(pod, tmp_path.as_uri())
    assert len(found) == len(theirs) == 40
    for ours, their in zip(found, theirs, strict=True):
        assert ours["__key__"] == their["__key__"]
        assert ours.keys() - {"__id__"} == {name for name in their if name == "__key__" or name[:2] != "__"}
        assert all(ours[name] == their[name] for name in ("bin", "cls", "json"))
