"""The commands ``refill pack``, ``refill index`` and ``refill inspect``: arguments in, text and exit status out."""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import re
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

from refill.errors import DatasetNotFound, InvalidInput
from refill.protocol.job_spec import check_is_folder
from refill_service.commands.amounts import size_of, whole
from refill_service.formats import FORMAT_NAMES

if TYPE_CHECKING:
    from refill_service.datasets.inspect_dataset import DatasetSummary
    from refill_service.datasets.pack import Remark
    from refill_service.datasets.write_columns import AskedColumn
    from refill_service.object_store.store_settings import StoreSettings

_STORE_HELP = "s3://, gs:// or az://bucket/prefix, https://host/folder, hf://datasets/OWNER/NAME, or a path"
_SCHEME = re.compile("(s3|file|gs|az|hf|https?):", re.IGNORECASE)
_NOTHING_TO_COMPARE = "the index has no checksums to compare them with"


def add_commands(subparsers: Any) -> None:
    """Each command sets ``func``: the parsed arguments in, the exit status out; errors are :class:`RefillError`."""
    _add_pack(subparsers)
    _add_index(subparsers)
    _add_inspect(subparsers)


def add_store_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "object store",
        "Credentials come from where each cloud's own programs find them. More settings by REFILL_STORE_*, see "
        "docs/SETTINGS.md.",
    )
    group.add_argument(
        "--endpoint-url",
        metavar="URL",
        help="S3 server other than AWS (default: AWS_ENDPOINT_URL_S3, AWS_ENDPOINT_URL)",
    )
    group.add_argument(
        "--region", help="region of the bucket (default: AWS_REGION, AWS_DEFAULT_REGION, the profile's, us-east-1)"
    )
    group.add_argument("--profile", help="AWS profile (default: AWS_PROFILE)")
    group.add_argument(
        "--no-sign-request", action="store_true", help="send no credentials, for public buckets (default: sign)"
    )


def store_settings_of(arguments: argparse.Namespace) -> StoreSettings:
    from refill_service.object_store.store_settings import StoreSettings

    return StoreSettings.from_environment(
        endpoint_url=arguments.endpoint_url,
        region=arguments.region,
        profile=arguments.profile,
        anonymous=arguments.no_sign_request or None,
    )


def _add_pack(subparsers: Any) -> None:
    parser = _command(
        subparsers,
        "pack",
        "make a dataset of a folder, a list of files, or a Hugging Face dataset: shuffled tars and their index",
        "Of a folder, files that have the same path up to the first dot of their name are one sample; up to the last"
        " dot where names look like those of photos. It says what it decided before it writes. Hidden files are left"
        " out. Memory does not grow with the folder. The index is written last: when pack is broken off there is no"
        " dataset, and you can simply start it again.",
        "refill pack /data/imagenet/train s3://datasets/imagenet --seed 7",
    )
    parser.add_argument(
        "source",
        metavar="SRC",
        help="folder: class folders as in ImageFolder, or plain files; or a CSV, TSV or JSON lines of paths and "
        "labels; or hf:NAME of a Hugging Face dataset, or a folder that its save_to_disk wrote",
    )
    parser.add_argument("url", metavar="DEST", help=_STORE_HELP)
    parser.add_argument(
        "--seed",
        type=int,
        default=0,
        help="of the shuffle: the same seed and files give the same order (default: %(default)s)",
    )
    parser.add_argument(
        "--blob-size",
        default="64MB",
        metavar="SIZE",
        help="how large a tar becomes, such as 64MB or 16MiB (default: %(default)s)",
    )
    parser.add_argument(
        "--classes",
        choices=("auto", "yes", "no"),
        default="auto",
        help="give each sample the number of its top folder as its class, a member `cls`; auto: if SRC has only "
        "folders "
        "at its top"
        " (default: %(default)s)",
    )
    parser.add_argument(
        "--include",
        action="append",
        metavar="GLOB",
        help="pack only files whose name or path matches, such as '*.jpg'; may be given more than once (default: all)",
    )
    parser.add_argument(
        "--split-names",
        choices=("auto", "first-dot", "last-dot"),
        default="auto",
        help="where the name of a sample ends: 1.seg.png is file seg.png of sample 1 (first-dot), or file png of "
        "sample "
        "1.seg (last-dot); auto: first-dot, unless the names look like those of photos (default: %(default)s)",
    )
    parser.add_argument(
        "--path-column", metavar="NAME", help="of a list: the column of paths (default: one called path, file, ...)"
    )
    parser.add_argument(
        "--label-column", metavar="NAME", help="of a list: the column of labels (default: one called label, cls, ...)"
    )
    parser.add_argument("--split", metavar="NAME", help="of a Hugging Face dataset (default: its only one)")
    parser.add_argument("--force", action="store_true", help="replace the dataset at DEST (default: refuse)")
    parser.add_argument(
        "--jobs",
        type=int,
        metavar="N",
        help="how many tars are built and stored at once, each by a process of its own, which takes twice --blob-size "
        "of memory; 1: no other process (default: two more than there are cores)",
    )
    _add_quiet(parser)
    add_store_options(parser)
    parser.set_defaults(func=_pack)


def _add_index(subparsers: Any) -> None:
    parser = _command(
        subparsers,
        "index",
        "make the index for a dataset that lies in a bucket already",
        "It finds out which format lies there, says what it decided, leaves the files as they are and writes the index"
        " beside them. docs/FORMATS.md says what is read of each format, and what becomes a sample.",
        "refill index s3://datasets/laion --jobs 8",
    )
    parser.add_argument("url", metavar="URL", help=_STORE_HELP)
    parser.add_argument(
        "--format",
        metavar="NAME",
        help=f"one of {', '.join(FORMAT_NAMES)} (default: whichever is found)",
    )
    parser.add_argument(
        "--checksums",
        choices=("all", "first-read"),
        help="all: read every byte, and keep a checksum of each sample; first-read: read headers only, and keep ETags:"
        " pods take a sample's checksum when they first read it, and refuse an object that was replaced (default:"
        " first-read where headers say where samples lie)",
    )
    parser.add_argument(
        "--output",
        metavar="INDEX_URL",
        help="write the index here, where URL is read-only: jobs name INDEX_URL as their dataset, and pods may have to "
        "be allowed both (default: beside the files)",
    )
    parser.add_argument(
        "--files",
        metavar="FILE",
        help="the names of the files below URL, one a line, also of hidden ones; web servers list nothing (default: a "
        "listing without hidden files, whose names or folders begin with . or _)",
    )
    parser.add_argument("--tokens", type=whole(1), metavar="N", help="of files of tokens: how many make a sample")
    parser.add_argument(
        "--stride",
        type=whole(1),
        metavar="S",
        help="of files of tokens: how many lie between the starts of two samples, N/2 or more (default: N)",
    )
    parser.add_argument(
        "--dtype", help="of files of tokens without a header: uint16, for example (default: the header's)"
    )
    parser.add_argument(
        "--allow-pickle",
        action="store_true",
        help="let in columns of pickles (MDS, LitData): they stay bytes, and only "
        'decode={"pkl": pickle.loads} runs them, where you train',
    )
    parser.add_argument(
        "--columns",
        metavar="A,B",
        help="of tables (Parquet, Arrow, LeRobot): the columns that samples have (default: all)",
    )
    parser.add_argument(
        "--windows",
        metavar="LENGTH,STRIDE",
        help="of tables and tars whose rows or samples are the steps of episodes, and of LeRobot's datasets: a sample "
        "is LENGTH of one, and the next begins STRIDE on, LENGTH/2 or more (default: each is a sample)",
    )
    parser.add_argument(
        "--episodes",
        metavar="NAME",
        default="episode_index",
        help="with --windows, of tables: the column that says which episode a row is of (default: %(default)s)",
    )
    parser.add_argument(
        "--column",
        action="append",
        metavar="NAME[=FILE]",
        help="write a column of numbers or text beside the index, for choosing samples: the values of FILE.npy, by id; "
        "else a field of the samples, for which all of them are read, as cls, json.score, or __key__. Where an index "
        "is there, it stays, and the column is added; may be given more than once",
    )
    parser.add_argument(
        "--jobs",
        type=int,
        metavar="N",
        help="how many files are read whole at once, each by a process of its own (default: two more than there are"
        " cores)",
    )
    there = parser.add_mutually_exclusive_group()
    there.add_argument("--force", action="store_true", help="replace an index that is there (default: refuse)")
    there.add_argument(
        "--append",
        action="store_true",
        help="add files that the index does not have: samples keep their ids, and jobs that run, or go on from a state,"
        " keep the version that they began with",
    )
    _add_quiet(parser)
    add_store_options(parser)
    parser.set_defaults(func=_index)


def _add_inspect(subparsers: Any) -> None:
    parser = _command(
        subparsers,
        "inspect",
        "show what is in a dataset, and check it",
        "Exit status 1 if --verify finds damage.",
        "refill inspect s3://datasets/imagenet --verify",
    )
    parser.add_argument("url", metavar="URL", help=_STORE_HELP)
    parser.add_argument("--json", action="store_true", help="print one JSON object (default: a table)")
    parser.add_argument(
        "--verify", action="store_true", help="read everything and check every checksum (default: read the index only)"
    )
    _add_quiet(parser)
    add_store_options(parser)
    parser.set_defaults(func=lambda arguments: asyncio.run(_inspect(arguments)))


def _command(subparsers: Any, name: str, summary: str, more: str, example: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = subparsers.add_parser(
        name,
        description=f"{summary[0].upper()}{summary[1:]}. {more}",
        epilog=f"example: {example}",
    )
    return parser


def _add_quiet(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--quiet", action="store_true", help="show no progress (default: on stderr)")


def _pack(arguments: argparse.Namespace) -> int:
    from refill_service.datasets.pack import pack
    from refill_service.datasets.progress import bytes_text

    url = dataset_url(arguments.url, is_there=False)
    if (status := _pack_items(arguments, url)) is not None:
        return status
    started = time.monotonic()
    summary = asyncio.run(
        pack(
            arguments.source,
            url,
            store_settings_of(arguments),
            seed=arguments.seed,
            blob_bytes=size_of("--blob-size", arguments.blob_size),
            classes=arguments.classes,
            include=arguments.include,
            split_names=arguments.split_names,
            say=lambda remark: _say(remark, quiet=arguments.quiet),
            force=arguments.force,
            quiet=arguments.quiet,
            jobs=arguments.jobs,
        )
    )
    classes = "" if summary.classes is None else f" of {_count(len(summary.classes), 'class', 'classes')}"
    excluded = "not included" if arguments.include else "that are no files (pipes, sockets)"
    left_out = [
        text
        for count, text in (
            (summary.num_hidden, f"{summary.num_hidden} hidden"),
            (
                summary.num_excluded,
                f"{summary.num_excluded} {excluded}",
            ),
            (summary.num_dangling, _count(summary.num_dangling, "link to nothing", "links to nothing")),
        )
        if count
    ]
    samples, files = _count(summary.num_samples, "sample"), _count(summary.num_files, "file")
    print(
        f"packed {samples}{classes} ({files}) into {_count(summary.num_blobs, 'blob')},"
        f" {_rate(summary.blob_bytes, started)}, at {url}" + (f"; left out: {', '.join(left_out)}" if left_out else "")
    )
    if not arguments.quiet:
        print(f"next: refill inspect {url}; {bytes_text(summary.blob_bytes / summary.num_blobs)} per blob")
    return 0


def _pack_items(arguments: argparse.Namespace, url: str) -> int | None:
    """What is no folder of files. None: it is one."""
    from refill_service.datasets.pack_samples import pack_samples
    from refill_service.datasets.pack_sources import items_of
    from refill_service.datasets.progress import bytes_text

    columns = {"path_column": arguments.path_column, "label_column": arguments.label_column, "split": arguments.split}
    items = items_of(arguments.source, **columns)
    if items is None:
        for name, value in columns.items():
            if value is not None:
                raise InvalidInput(
                    f"--{name.replace('_', '-')}: {arguments.source} is no list and no Hugging Face dataset"
                )
        return None
    if arguments.include or arguments.classes != "auto" or arguments.split_names != "auto":
        raise InvalidInput("--include, --classes and --split-names are for folders of files")

    def say(text: str) -> None:
        if not arguments.quiet:
            print(text, file=sys.stderr, flush=True)

    say(items.said)
    found = asyncio.run(
        pack_samples(
            items.samples,
            url,
            store_settings_of(arguments),
            function=items.function,
            seed=arguments.seed,
            blob_bytes=size_of("--blob-size", arguments.blob_size),
            classes=items.classes,
            force=arguments.force,
            quiet=arguments.quiet,
            jobs=arguments.jobs,
            about=items.about,
            say=say,
        )
    )
    classes = "" if items.classes is None else f" of {_count(len(items.classes), 'class', 'classes')}"
    kept = f", {found.num_kept} of them before it was broken off" if found.num_kept else ""
    samples, blobs = _count(found.num_samples, "sample"), _count(found.num_blobs, "blob")
    print(f"packed {samples}{classes} into {blobs}{kept}, {_rate_of(found.made_bytes, found.seconds)}, at {url}")
    making, storing = (
        bytes_text(found.made_bytes * found.jobs / max(seconds, 1e-9))
        for seconds in (found.making_seconds, found.storing_seconds)
    )
    if found.made_bytes and not arguments.quiet:
        by = _count(found.jobs, "process", "processes")
        print(f"by {by}, which alone would read the source at {making}/s, and write to the store at {storing}/s")
    return 0


def _say(remark: Remark, *, quiet: bool) -> None:
    if remark.is_warning:
        print(f"refill: warning: {remark.text}", file=sys.stderr, flush=True)
    elif not quiet:
        print(remark.text, file=sys.stderr, flush=True)


def _index(arguments: argparse.Namespace) -> int:
    from refill_service.datasets.index_shards import index_shards
    from refill_service.datasets.progress import bytes_text
    from refill_service.datasets.write_columns import asked_column
    from refill_service.formats.interface import Options

    url = dataset_url(arguments.url)
    output = None if arguments.output is None else dataset_url(arguments.output, is_there=False)
    columns = None if arguments.columns is None else tuple(each.strip() for each in arguments.columns.split(","))
    asked = [asked_column(each) for each in arguments.column or ()]
    if asked and not arguments.force and not arguments.append and _has_index(output or url, arguments):
        return _add_columns(output or url, asked, arguments)
    started = time.monotonic()
    summary = asyncio.run(
        index_shards(
            url,
            store_settings_of(arguments),
            jobs=arguments.jobs,
            in_processes=None if arguments.jobs is None else arguments.jobs > 1,
            force=arguments.force,
            quiet=arguments.quiet,
            format_name=arguments.format,
            checksums=arguments.checksums,
            options=Options(
                arguments.tokens,
                arguments.stride,
                arguments.dtype,
                columns,
                None if arguments.windows is None else _windows(arguments.windows),
                arguments.episodes,
                allow_pickle=arguments.allow_pickle,
            ),
            output=output,
            names=None if arguments.files is None else _names_in(arguments.files),
            append=arguments.append,
            say=lambda text: None if arguments.quiet else print(text, file=sys.stderr, flush=True),
        )
    )
    for warning in summary.warnings:
        print(f"refill: warning: {warning}", file=sys.stderr)
    files = "tars" if summary.format == "webdataset" else "files"
    if summary.checksums == "all":
        size = _rate(summary.blob_bytes, started)
    else:
        size = f"{bytes_text(summary.blob_bytes)} of which no more than headers were read"
    print(
        f"indexed {summary.num_samples} samples in {summary.num_files} {files}, {size}, at {url}"
        + (f", which the index at {output} names" if output else "")
        + (f"; {summary.num_passed_over} {summary.passed_over} are of no sample" if summary.num_passed_over else "")
    )
    return _add_columns(output or url, asked, arguments) if asked else 0


def _windows(text: str) -> tuple[int, int]:
    try:
        length, stride = (int(each) for each in text.split(","))
    except ValueError as error:
        raise InvalidInput(f"--windows must be LENGTH,STRIDE, two numbers, got {text!r:.50}") from error
    return length, stride


def _has_index(url: str, arguments: argparse.Namespace) -> bool:
    from refill_service.datasets.dataset_reader import Dataset

    async def look() -> None:
        await (await Dataset.open(url, store_settings_of(arguments))).close()

    try:
        asyncio.run(look())
    except DatasetNotFound:
        return False
    return True


def _add_columns(url: str, asked: list[AskedColumn], arguments: argparse.Namespace) -> int:
    from refill_service.datasets.write_columns import write_columns

    found = asyncio.run(write_columns(url, asked, store_settings_of(arguments), quiet=arguments.quiet))
    for name, kind in found:
        print(f"column {name}: {kind}, beside the index at {url}")
    return 0


async def _inspect(arguments: argparse.Namespace) -> int:
    from refill_service.datasets.dataset_reader import Dataset
    from refill_service.datasets.inspect_dataset import describe, find_damage
    from refill_service.datasets.progress import Progress

    dataset = await Dataset.open(dataset_url(arguments.url), store_settings_of(arguments))
    damage = []
    try:
        summary = await describe(dataset, despite_damage=arguments.verify)
        if not arguments.json:
            _print_summary(summary)
        if arguments.verify:
            with Progress("verifying", summary.sample_bytes, quiet=arguments.quiet) as progress:
                async for error in find_damage(dataset, progress.advance):
                    if arguments.json:
                        damage.append({"error": type(error).__name__, "message": error.message, **error.details})
                    else:
                        print(error.message)
                        damage.append({})
    finally:
        await dataset.close()
    if arguments.json:
        found = {"verified": arguments.verify, **({"damage": damage} if arguments.verify else {})}
        print(json.dumps({**dataclasses.asdict(summary), **found}))
    elif arguments.verify:
        fine = "are as they were packed" if summary.has_checksums else "are there; " + _NOTHING_TO_COMPARE
        print(f"{len(damage)} damaged" if damage else f"all {summary.num_samples} samples {fine}")
    return 1 if damage else 0


def _print_summary(summary: DatasetSummary) -> None:
    from rich.console import Console
    from rich.table import Table

    from refill_service.cache_core.planned.job_plan import SHORT_ENOUGH
    from refill_service.datasets.progress import bytes_text

    table = Table(show_header=False, box=None, pad_edge=False)
    classes = summary.metadata.get("classes")
    rows = [
        ("dataset", summary.url),
        ("made by", f"refill {summary.metadata.get('made_by')}"),
        ("samples", f"{summary.num_samples:,}, {bytes_text(summary.sample_bytes)}"),
        ("blobs", f"{summary.num_blobs:,}, {bytes_text(summary.blob_bytes)}"),
        ("index", f"{bytes_text(summary.index_bytes)}, fingerprint {summary.fingerprint}"),
    ]
    if (form := summary.metadata.get("format")) is not None:
        said = ", ".join(
            f"{name} {value}" for name, value in form.items() if type(value) in (str, int) and name != "name"
        )
        rows.append(("format", f"{form.get('name')}" + f" ({said})" * bool(said)))
    if summary.data_url is not None:
        rows.append(("data", summary.data_url))
    if not summary.has_checksums:
        rows.append(("checksums", "each sample's at its first read (--checksums first-read)"))
    if classes:
        rows.append(("classes", f"{len(classes):,} ({', '.join(classes[:3])}{', ...' if len(classes) > 3 else ''})"))
    if (labels := summary.labels) is not None:
        each = f"{labels['least']:,}" + (f" to {labels['most']:,}" if labels["most"] > labels["least"] else "")
        shared = f"{labels['same_neighbours']:.0%} of neighbours share one ({labels['same_by_chance']:.0%} by chance)"
        rows.append(("labels", f"{labels['classes']:,} different, {each} samples each; {shared}"))
    why = ", since it is stored by class" if summary.by_class else ""
    listed = f"{summary.default_chunk_size} where ranks list the order{why}"
    rows.append(("chunk size", f"pods choose it by their memory (refill analyze); {listed}"))
    for label, values, text in (
        ("sample size", summary.sample_sizes, bytes_text),
        ("blob size", summary.blob_sizes, bytes_text),
        ("samples a blob", summary.samples_per_blob, lambda value: f"{value:,}"),
    ):
        about = "about " if label == "sample size" and not summary.sample_sizes_exact else ""
        about = "means of groups: " if about and summary.sample_sizes_are_means else about
        rows.append((label, about + ", ".join(f"{name} {text(value)}" for name, value in values.items())))
    more = summary.more_for_short_chunks
    short = [f"K={chunk_size} {part:.0%}" for chunk_size, part in more.items() if part > SHORT_ENOUGH]
    if short:
        rows.append(("short chunks", f"at the ends of blobs; more GETs for them: {', '.join(short)}"))
    for label, value in rows:
        table.add_row(label, value)
    # Piped, lines are not to be broken at a width that nobody looks at.
    Console(width=None if sys.stdout.isatty() else 240, highlight=False, markup=False).print(table)


def dataset_url(given: str, *, is_there: bool = True) -> str:
    """A plain path means a folder here; pods, which have other working folders, get URLs only. ``s3:/bucket``, with a
    slash too few, is no folder ``s3:``.

    :param is_there: it is to be read, so a folder has to exist.

    Raises :class:`InvalidInput` for one that does not, and for tars in place of the folder that holds them.
    """
    check_is_folder(given)
    if not _SCHEME.match(given) and "://" not in given:
        folder = Path(given).resolve()
        meant = "" if given.startswith(("/", ".", "~")) else f"; is s3://{given} meant?"
        if is_there and not folder.is_dir():
            raise InvalidInput(_no_folder(folder, meant))
        return folder.as_uri()
    if is_there and given.startswith("file:///") and not (folder := Path(unquote(urlsplit(given).path))).is_dir():
        raise InvalidInput(_no_folder(folder))
    return given


def _no_folder(path: Path, meant: str = "") -> str:
    return f"{path} is a file: name the folder of a dataset" if path.exists() else f"there is no folder {path}{meant}"


def _names_in(path: str) -> list[str]:
    try:
        return [line for line in Path(path).read_text().splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInput(f"can't read the names of files in {path}: {error}") from error


def _count(number: int, one: str, many: str = "") -> str:
    return f"{number} {one if number == 1 else many or one + 's'}"


def _rate(num_bytes: int, started: float) -> str:
    return _rate_of(num_bytes, max(time.monotonic() - started, 1e-9))


def _rate_of(num_bytes: int, seconds: float) -> str:
    from refill_service.datasets.progress import bytes_text

    return f"{bytes_text(num_bytes)} in {seconds:.1f} s ({bytes_text(num_bytes / seconds)}/s)"
