"""Who takes part? Each loader's name, the function that opens it, and what it can keep."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["LOADERS", "Loader"]


@dataclass(frozen=True)
class Loader:
    module: str
    """In this folder; imported only where it runs, since each brings libraries of its own."""
    function: str = "open_loader"
    settings: str = "SETTINGS"
    keeps_samples: bool = True
    """False: the allowance means nothing to it, so it is run once."""
    library: str = ""
    """Distribution whose version is reported."""
    pods: bool = False


LOADERS = {
    "No-I/O": Loader("no_io", keeps_samples=False),
    "refill drain": Loader("refill_pods", "open_drain", "SETTINGS_DRAIN", library="refill", pods=True),
    "refill redox": Loader("refill_pods", "open_redox", "SETTINGS_REDOX", library="refill", pods=True),
    "boto3": Loader("boto3_get", keeps_samples=False, library="boto3"),
    "boto3, 16 threads": Loader(
        "boto3_get", "open_threads", "SETTINGS_THREADS", keeps_samples=False, library="boto3"
    ),
    "s3torchconnector": Loader("s3torch", keeps_samples=False, library="s3torchconnector"),
    "WebDataset": Loader("web_dataset", library="webdataset"),
    "MosaicML Streaming": Loader("mosaic_streaming", library="mosaicml-streaming"),
    "LitData": Loader("lit_data", library="litdata"),
}
