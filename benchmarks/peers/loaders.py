"""Who takes part? Each loader's name, the function that opens it, and how it is set up, for the report."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["LOADERS", "Loader"]


@dataclass(frozen=True)
class Loader:
    module: str
    """In this folder; imported only where it runs, since each brings libraries of its own."""
    settings: str
    docs: str
    function: str = "open_loader"
    distributions: tuple[str, ...] = ()
    """Whose versions are reported."""
    keeps_samples: bool = True
    """False: the allowance means nothing to it, so it is run once."""
    pods: bool = False


_DATA_LOADER = "https://docs.pytorch.org/docs/stable/data.html"

LOADERS = {
    "No-I/O": Loader(
        "no_io",
        "`DataLoader`, `shuffle=True`; samples of the same sizes cut from one buffer in memory",
        _DATA_LOADER,
        keeps_samples=False,
    ),
    "refill planned": Loader(
        "refill_pods",
        "two pods with `memory_bytes` = half of the allowance each, `job_memory_fraction=1` and "
        "`pinned_fraction=0`, tars of 32 MB, `chunk_size=8` by the pods' own choice; `DataLoader` "
        "with `EpochSampler`",
        "CLIENT.md",
        "open_planned",
        ("refill-cache",),
        pods=True,
    ),
    "refill planned, 32 a chunk": Loader(
        "refill_pods",
        "the same with `chunk_size=32`",
        "CLIENT.md",
        "open_planned_large_chunks",
        ("refill-cache",),
        pods=True,
    ),
    "refill redox": Loader(
        "refill_pods",
        "the same with `policy=redox`, `chunk_size=64`",
        "PROTOCOL.md",
        "open_redox",
        ("refill-cache",),
        pods=True,
    ),
    "boto3": Loader(
        "boto3_get",
        "`get_object` in `__getitem__`, `DataLoader` with `shuffle=True`",
        _DATA_LOADER,
        distributions=("boto3", "torch"),
        keeps_samples=False,
    ),
    "boto3, 16 threads": Loader(
        "boto3_get",
        "the same, with `__getitems__` and 16 threads in each worker",
        _DATA_LOADER,
        "open_threads",
        ("boto3", "torch"),
        keeps_samples=False,
    ),
    "s3torchconnector": Loader(
        "s3torch",
        "`S3MapDataset.from_prefix`, `DataLoader` with `shuffle=True`",
        "https://awslabs.github.io/s3-connector-for-pytorch/",
        distributions=("s3torchconnector",),
        keeps_samples=False,
    ),
    "WebDataset": Loader(
        "web_dataset",
        "tars of 4 MB by http (curl), `shardshuffle` over all of them, `shuffle(n)` in each worker with n = its part "
        "of the allowance in samples, batched in the worker, `WebLoader`",
        "https://webdataset.github.io/webdataset/",
        distributions=("webdataset",),
    ),
    "WebDataset, 32 MB tars": Loader(
        "web_dataset",
        "the same with the tars that refill reads: fewer connections to start, neighbours longer together",
        "https://webdataset.github.io/webdataset/",
        "open_large",
        ("webdataset",),
    ),
    "MosaicML Streaming": Loader(
        "mosaic_streaming",
        "MDS shards of 4 MB, `cache_limit` = allowance, `py1e`, `shuffle_block_size` = half of the allowance in "
        "samples, `predownload` = an eighth of it, at least a batch; `StreamingDataLoader`",
        "https://docs.mosaicml.com/projects/streaming/en/stable/dataset_configuration/shuffling.html",
        distributions=("mosaicml-streaming",),
    ),
    "LitData": Loader(
        "lit_data",
        "chunks of 4 MB made by `optimize`, `max_cache_size` = allowance, `shuffle=True`, all else by default; "
        "`StreamingDataLoader`",
        "https://lightning.ai/docs/litdata/features/manage-disk-cache",
        distributions=("litdata",),
    ),
}
