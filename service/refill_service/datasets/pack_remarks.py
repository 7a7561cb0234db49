"""What was decided about a folder that is to be packed, and why? Said before anything is written."""

from __future__ import annotations

from typing import NamedTuple

from refill_service.datasets.sample_names import FIRST
from refill_service.datasets.source_scan import SourceScan

__all__ = ["Remark", "remarks_on"]


class Remark(NamedTuple):
    """A line that ``refill pack`` says before it begins."""

    text: str
    is_warning: bool
    """Else it is what one expects, and only good to know."""


def remarks_on(scan: SourceScan, classes: str, class_names: list[str] | None) -> list[Remark]:
    """:param classes: as it was asked for: ``auto``, ``yes`` or ``no``."""
    files, samples = _count(scan.num_files, "file"), _count(scan.num_samples, "sample")
    found = [Remark(f"{scan.folder}: {files}, {samples}", False)]
    if scan.split.num_dotted:
        found.append(_on_names(scan))
    elif scan.num_samples < scan.num_files:
        found.append(Remark("files with the same name but for what follows the dot are one sample", False))
    if class_names is not None:
        number = _count(len(class_names), "class", "classes")
        found.append(Remark(f"{number}, the folders at its top: {_some(class_names)}", False))
        if empty := scan.empty_top_folders:
            found.append(Remark(f"{_count(len(empty), 'class', 'classes')} without any sample: {_some(empty)}", True))
    elif classes == "auto" and scan.top_folders:
        found.append(
            Remark(
                f"no classes, since {scan.file_at_top} lies beside the folders ({_some(scan.top_folders)}): if these"
                " are classes, move it away or leave it out by --include; --classes no says that they are not",
                True,
            )
        )
    if scan.mixed_members:
        members = _some([f"{name or 'no extension'} {count:,}" for name, count in scan.mixed_members])
        found.append(
            Remark(
                f"samples have different members ({members} of {scan.num_samples:,}), which a DataLoader does not put"
                " into one batch: CacheDataset(..., transform=function) can name them alike",
                True,
            )
        )
    if scan.num_empty:
        found.append(Remark(f"{_count(scan.num_empty, 'empty file')}, packed so: {scan.empty_file}", True))
    if scan.num_dangling:
        found.append(Remark(f"{_count(scan.num_dangling, 'link')} to nothing, left out: {scan.dangling_link}", True))
    if scan.num_outside:
        links = _count(scan.num_outside, "link")
        found.append(Remark(f"{links} out of the folder, packed with what is there: {scan.outside_link}", True))
    return found


def _on_names(scan: SourceScan) -> Remark:
    split = scan.split
    text = f"{_count(split.num_dotted, 'name')} with more than one dot"
    if not split.example:
        return Remark(f"{text}; all names are split at the {split.at.replace('-', ' ')}, as --split-names says", False)
    if split.at == FIRST:
        why = "as those of WebDataset are; --split-names last-dot makes each of them a sample"
        return Remark(f"{text}, as {split.example}: split at the first, {why}", True)
    why = "as those of photos are; --split-names first-dot joins them, as WebDataset does"
    return Remark(f"{text}, as {split.example}: split at the last, {why}", True)


def _count(number: int, one: str, many: str = "") -> str:
    return f"{number:,} {one if number == 1 else many or one + 's'}"


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
