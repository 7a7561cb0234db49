"""The writers and readers of those whose formats we read, where they are installed; else the test is skipped.

They want other versions of what the tests want, so they are no extra of the distribution, and come without theirs:
``make test-formats`` installs ``peers.txt``.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import types
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

_KEPT: dict[str, Any] = {}

__all__ = ["litdata", "megatron", "mosaicml", "read_array_record", "tfrecord", "webdataset", "write_array_record"]


def mosaicml() -> Any:
    """mosaicml-streaming's writer, reader and encodings, without what else it imports (torchvision, clouds)."""
    if "mosaicml" in _KEPT:
        return _KEPT["mosaicml"]
    pytest.importorskip("brotli", reason="mosaicml-streaming is not installed")
    spec = importlib.util.find_spec("streaming")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("mosaicml-streaming is not installed")
    root = next(iter(spec.submodule_search_locations))
    for name in ("streaming", "streaming.base"):
        module = sys.modules[name] = types.ModuleType(name)
        module.__path__ = [os.path.join(root, *name.split(".")[1:])]
    found = _KEPT["mosaicml"] = types.SimpleNamespace()
    found.MDSWriter = importlib.import_module("streaming.base.format.mds.writer").MDSWriter
    found.MDSReader = importlib.import_module("streaming.base.format.mds.reader").MDSReader
    found.encodings = importlib.import_module("streaming.base.format.mds.encodings")
    return found


def tfrecord() -> Any:
    return pytest.importorskip("tfrecord")


def litdata() -> Any:
    return pytest.importorskip("litdata")


def webdataset() -> Any:
    return pytest.importorskip("webdataset")


def megatron() -> Any:
    """Megatron-LM's ``indexed_dataset``, its writer and its reader, without what else the package imports."""
    if "megatron" in _KEPT:
        return _KEPT["megatron"]
    try:
        spec = importlib.util.find_spec("megatron.core")
    except ModuleNotFoundError:
        spec = None
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("megatron-core is not installed")
    root = next(iter(spec.submodule_search_locations))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, folder in (("megatron.core", root), ("megatron.core.datasets", os.path.join(root, "datasets"))):
            module = sys.modules[name] = types.ModuleType(name)
            module.__path__ = [folder]
        importlib.import_module("megatron.core.parallel_state")  # first, since it and its utils import each other
        _KEPT["megatron"] = importlib.import_module("megatron.core.datasets.indexed_dataset")
    return _KEPT["megatron"]


def write_array_record(path: Path, options: str, records: Sequence[bytes]) -> None:
    writer = _array_record().ArrayRecordWriter(str(path), options)
    for each in records:
        writer.write(each)
    writer.close()


def read_array_record(path: Path) -> list[bytes]:
    found: list[bytes] = _array_record().ArrayRecordReader(str(path)).read_all()
    return found


def _array_record() -> Any:
    pytest.importorskip("zstandard", reason="ArrayRecord is packed by zstd")
    return pytest.importorskip("array_record.python.array_record_module")
