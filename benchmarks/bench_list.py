"""Which benchmarks are there, what prints each, what does it need, and how is it tried in small?

``make figures`` runs them all; tests run their smallest forms, so that none rots.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

__all__ = ["BENCHES", "PARTS", "Bench", "asked_for"]


@dataclass(frozen=True)
class Bench:
    program: str
    """A file of this folder, without ``.py``."""
    target: str = ""
    """Of make. Where there is none, the program is run as it is."""
    arguments: str = ""
    """Of the program, where there is no target."""
    smallest: str = ""
    """Arguments of the smallest form; ``{plots}`` in them is a folder."""
    constants: Mapping[str, Any] = field(default_factory=dict)
    """Of the program, as its smallest form has them. A function is given what the program has."""
    rows: tuple[str, ...] = ()
    """Regular expressions: what the smallest form prints, a line for each."""
    not_here: str = ""
    """Why there is no smallest form."""
    page: str = ""
    """Of docs/, which it writes itself."""
    is_long: bool = False
    """Whether the smallest form takes more than some 3 seconds of CPU: it is left to make test-all."""
    needs_root: bool = False
    """For networks of its own."""
    minutes: float = 10
    """After so many it is ended."""
    plots: tuple[str, ...] = ()
    """Files that it writes: into build/, and in its smallest form into ``{plots}``."""

    @property
    def command(self) -> str:
        """As docs have it."""
        return f"make {self.target}" if self.target else f"python benchmarks/{self.program}.py {self.arguments}".strip()


BENCHES = (
    Bench(
        "core_takes",
        "bench-core",
        constants={"NUM_SAMPLES": 20_000, "ROUNDS": 1},
        rows=("redox, from memory", "redox, whole epoch", "floor", "order"),
    ),
    Bench(
        "pod_throughput",
        "bench-pods",
        constants={"ROUNDS": 1, "BATCH": 32, "WARM_UP": 96, "SHAPES": ((100_000, 128), (3_000, 512))},
        rows=tuple(f"{way} +{size} " for way in ("client <- pod", "pod <- pod") for size in ("100,000", "3,000")),
        is_long=True,
    ),
    Bench(
        "refill_throughput",
        "bench-refill",
        constants={"ROUNDS": 1, "SAMPLES": 768, "SAMPLE_BYTES": 20_000, "CHUNK_SIZES": (16,)},
        rows=("filling in chunks of 16 / store alone", "draining in chunks of 16 / store alone"),
        is_long=True,
    ),
    Bench(
        "shaped_link",
        "bench-shaped",
        constants={"NUM_SAMPLES": 600, "NUM_RANKS": 2, "EPOCHS": 2, "IO_EPOCHS": 2, "FRESH_JOBS": 1},
        rows=(
            "plain sockets",
            "first batch of a fresh job, slow start",
            "I/O-bound, steady state",
            "peak memory of a pod",
        ),
        is_long=True,
        needs_root=True,
    ),
    Bench(
        "pods_scale",
        "bench-pods-scale",
        smallest="--pods 1 2 --sizes 3000 --rounds 1 --plot {plots}/pods_scale.svg",
        constants={"SHAPES": {3_000: 1_280}},
        rows=("3,000 +1 ", "3,000 +2 ", "2 pods over 1", "an answer of 32 samples"),
        is_long=True,
        minutes=20,
        plots=("pods_scale.svg",),
    ),
    Bench(
        "loop_pieces",
        "bench-pieces",
        constants={
            "SHAPES": lambda shapes: [shape._replace(num_samples=2_048, batch=32) for shape in shapes[:4:3]],
            "PLANNED_SAMPLES": 4_096,
            "SPANS": 100,
        },
        rows=("exact rolling +64 +2,048", "exact earliest +64 +2,048", "it is registered", "a receipt", "it ends"),
    ),
    Bench(
        "core_moves",
        "bench-cores",
        constants={"ROUNDS": 1, "SAMPLES": 1_536, "SAMPLE_BYTES": 20_000, "CLUSTERS": (1,)},
        rows=(r"pods 1: .* CPU s/GB",),
        is_long=True,
    ),
    Bench(
        "store_libraries",
        "bench-store",
        constants={"ROUNDS": 1, "ROUND_SECONDS": 0.01, "SIZES": (100_000,), "OBJECT_BYTES": 1_000_000, "OBJECTS": 1},
        rows=("boto3 +[0-9]", "obstore +[0-9]", "pread +[0-9]", "preadv +[0-9]"),
        is_long=True,
    ),
    Bench(
        "tls_cost",
        "bench-tls",
        constants={"ROUNDS": 1, "SHAPES": ((3_000, 1_024),)},
        rows=("open +3,000", "secured +3,000", "secured / open, samples of 3,000 bytes +[0-9]"),
        is_long=True,
    ),
    Bench(
        "connection_holder",
        "bench-holder",
        constants={"ROUNDS": 1, "SHAPES": ((3_000, 1_024),), "CONNECTIONS": 3},
        rows=("own, open", "held, open", "own, TLS", "held, TLS", "with ticket"),
        is_long=True,
    ),
    Bench(
        "warm_epochs",
        "bench-warm",
        smallest="--quick",
        rows=("local files +as fast", "disk tier +as fast", "by Unix socket +computing", "disk tier, computing"),
        is_long=True,
    ),
    Bench(
        "two_jobs",
        "bench-two-jobs",
        smallest="--samples 3000 --sample-bytes 2000 --memory-bytes 2000000 --epochs 1",
        rows=(r"\| 2 \| none \| 0 ", r"\| 2 \| 0 \| 0.4 ", r"\| 4 \| 0 "),
        is_long=True,
    ),
    Bench(
        "start_up",
        "bench-start",
        smallest="--rounds 1",
        constants={"GIVE_UP_SECONDS": 240},
        rows=("seconds from start to ready",),
    ),
    Bench(
        "stalls",
        "bench-stalls",
        smallest="--only killed",
        rows=(r"\| a pod's process is killed",),
        is_long=True,
        needs_root=True,
    ),
    Bench(
        "stand_ins",
        "bench-stand-ins",
        smallest="--rounds 1 --only 0",
        constants={"NUM_SAMPLES": 768},
        rows=(r"\| cold start, 70 % of the link",),
        is_long=True,
        needs_root=True,
        minutes=20,
    ),
    Bench(
        "orders",
        "bench-orders",
        smallest="--samples 512 --only 'boto3, 16 threads' 'exact, K=8' 'planned, K=8'",
        rows=("boto3, 16 threads +3", "exact, K=8 +3", "planned, K=8 +3"),
        is_long=True,
        needs_root=True,
        minutes=20,
    ),
    Bench(
        "pod_memory",
        "bench-memory",
        constants={"SHAPES": ((2_000, 2_000, 16 << 20),)},
        rows=("2,000 +2,000 +16 Mi", "the most that a pod held / its limit"),
        is_long=True,
        minutes=20,
    ),
    Bench(
        "large_index",
        "bench-scale",
        smallest="--samples 1e5 --pods 10",
        rows=("build", "open: head and blobs", "an epoch of it", "head and all records"),
        is_long=True,
        minutes=30,
    ),
    Bench(
        "pack_cores",
        "bench-pack",
        smallest="--megabytes 1 --jobs 1 2 --rounds 1",
        rows=("pack, 3,000 bytes each +2", "index, 100,000 bytes each +2"),
        is_long=True,
        minutes=20,
    ),
    Bench(
        "decode_rows",
        "bench-rows",
        constants={"LEAST_SECONDS": 0.001, "GROUP_BYTES": 200_000},
        rows=("six numbers +zstd", "a row at the client", "512 tokens of int32 +[0-9.]+ +[0-9.]+ +[0-9.]+$"),
    ),
    Bench("cut_samples", "bench-cuts", constants={"_BATCH": 64}, rows=("tar +members=txt", "parquet +members=jpg")),
    Bench(
        "planned_orders",
        "bench-planned",
        smallest="--samples 4096 --batch 32 --epochs 1",
        constants={"MEMORY_PARTS": (0.25,), "CHUNK_SIZES": (8, 16)},
        rows=(r"\| 25%, 8 \(8\)", r"\| 25%, 16 \(4\)"),
        minutes=30,
    ),
    Bench(
        "planned_reads",
        "bench-planned",
        smallest="--samples 4096 --epochs 1 --workers 2 --tables 'W,memory over planned'",
        constants={"LOST_AT": (0.5,), "MEMORY_OVER_PLANNED": (0.9,)},
        rows=(r"\| 2 \|", r"\| 0.9 \|", r"\| 0.5 \| .*x M"),
        minutes=30,
    ),
    Bench(
        "training_quality",
        "bench-quality",
        smallest="--seeds 2 --plot {plots}/training_quality.svg",
        constants={
            "MADE_UP": lambda setting: replace(setting, num_samples=4_096, num_epochs=1),
            "IMAGES": lambda settings: (replace(settings[0], num_epochs=1),),
        },
        rows=("made up: 4,096 samples", "digits: 1,500 samples", "redox K=64"),
        is_long=True,
        minutes=30,
        plots=("training_quality.svg",),
    ),
    Bench(
        "importance_training",
        "bench-importance",
        smallest="--seeds 2 --only digits --epochs 5",
        constants={"SETTINGS": lambda settings: settings[:1]},
        rows=("digits: epochs to 95%", "uniform", "importance, 2.5x"),
        is_long=True,
        minutes=30,
    ),
    Bench(
        "class_plans",
        arguments="--samples 38400 --pods 3 --batch 64 --stored mixed --memory .05 .1 .2 --orders buckets sorted",
        smallest="--samples 4096 --memory 0.1 --chunk-sizes 8 --stored mixed rare",
        rows=(r"\| mixed, buckets \| 10% \| 8", r"\| rare, buckets \| 10% \| 8"),
        minutes=20,
    ),
    Bench(
        "length_buckets",
        smallest="--samples 2048 --buckets 10 --memory 0.1 --chunk-sizes 8",
        rows=(r"\| none \| refill", r"\| 10, 10% \| refill, K = 8"),
    ),
    Bench(
        "exact_reads",
        arguments="--samples 16384",
        smallest="--samples 1024 --epochs 2",
        rows=(r"\| never \| 1 \|", r"\| earliest \| 64 \|"),
        minutes=20,
    ),
    Bench(
        "order_frontier",
        arguments="--plot build/orders.svg",
        smallest="--samples 512 --plot {plots}/orders.svg",
        constants={"MEMORY": (0.2,)},
        rows=("bucket alone", "exact, K=64", "planned, K=32"),
        is_long=True,
        minutes=20,
        plots=("orders.svg",),
    ),
    Bench(
        "in_memory",
        constants={"NUM_SAMPLES": 2_048, "SAMPLE_BYTES": 8_000, "EPOCHS": 2, "BATCH": 128},
        rows=("all pinned, in order", "all pinned, any order", "R = 1/2, any order", "R = 1/4, any order"),
        is_long=True,
    ),
    Bench(
        "mixtures",
        smallest="--samples 700 --bytes 200",
        rows=("35 of equal size", " 1  +[0-9.]+ ", "35  +[0-9.]+ "),
        is_long=True,
    ),
    Bench(
        "client_decode",
        constants={"SECONDS": 0.02, "WORKER_BATCHES": 2},
        rows=("tarfile, short names", "__getitems__, decode=views", "from a worker, decode=None"),
        is_long=True,
    ),
    Bench(
        "decoded_pictures",
        "bench-decode",
        smallest="--pictures 64 --workers 1 --rounds 1",
        constants={"BATCH": 16, "DIFFERENT": 16},
        rows=("decoder alone, ", "workers, Pillow", "views, ", "workers, bytes, "),
        is_long=True,
    ),
    Bench(
        "receipt_digest",
        constants={"BATCHES": 3, "ROUNDS": 1},
        rows=("batches of +32: worker", "of +1024: worker"),
    ),
    Bench("shaped_network", rows=("unlimited bbr", "1600 mbit reno"), is_long=True, needs_root=True),
    Bench(
        "peers/run",
        "bench-peers",
        not_here="peers' libraries have an environment of their own: make bench-peers PEERS_FLAGS=--quick",
        needs_root=True,
        minutes=60,
        page="PEERS.md",
    ),
    Bench(
        "dlio/run",
        "bench-dlio",
        not_here="DLIO has an environment of its own: make bench-dlio DLIO_FLAGS=--smallest",
        needs_root=True,
        minutes=40,
    ),
    Bench(
        "papers/__main__",
        "papers",
        not_here="tests/benchmarks/test_papers*.py has each of its programs in small",
        minutes=40,
        page="PAPERS.md",
    ),
)

PARTS = ("orders_rank", "shaped_rank", "smallest", "figures")
"""Programs of this folder that others start."""


def asked_for(names: list[str]) -> list[Bench]:
    """Those that are named: by target, with or without its ``bench-``, or by program. Raises ValueError."""
    found = []
    for name in names:
        those = [each for each in BENCHES if name in (each.program, each.target, each.target.removeprefix("bench-"))]
        if not those or not name:
            known = dict.fromkeys(each.target or each.program for each in BENCHES)
            raise ValueError(f"there is no benchmark {name!r}: {', '.join(known)}")
        found += those
    return found
