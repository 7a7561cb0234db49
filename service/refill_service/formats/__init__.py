"""Where do samples lie, in each format that a dataset may lie in? Each module here is one scanner.

``refill/formats`` has the other half, parsers of single samples. The table is in ``table.py``; names are here, for the
help of the command line, which imports no more than these.
"""

FORMAT_NAMES = (
    "lerobot", "mds", "litdata", "webdataset", "parquet", "arrow", "megatron", "tfrecord", "arrayrecord", "jsonl",
    "tokens", "zip", "objects",
)  # fmt: skip
"""In the order in which they are looked for."""
