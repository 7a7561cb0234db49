"""What does the choice of policy and chunk size look like? GETs per sample against how well an epoch shuffles."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from refill.errors import InvalidInput, RefillError
from refill.protocol.policies import POLICIES
from refill_service.datasets.progress import bytes_text
from refill_service.planning.analysis import MOST_CO_BATCH, Analysis, Row

_COLOURS = {"planned": "#ff7f0e", "redox": "#d62728", "none": "#555555"}
_OTHER_COLOUR = "#9467bd"
# Each policy's labels on a side of their own, so that points that lie close together stay readable.
_LABELS_AT = {
    "planned": ((0, 7), "center", "bottom"),
    "redox": ((7, 7), "left", "bottom"),
    "none": ((-7, 7), "right", "bottom"),
}


def require_matplotlib() -> None:
    """Raises :class:`InvalidInput` that says how to get it."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise InvalidInput("matplotlib is not installed; --plot needs: pip install 'refill-cache[plot]'") from error


def draw_frontier(path: Path, analysis: Analysis, rows: Sequence[Row], recommended: tuple[str, int | None]) -> None:
    """Write a .png or .svg, by the name.

    :param recommended: the policy, and its K if there is one.
    """
    require_matplotlib()
    from matplotlib.figure import Figure
    from matplotlib.ticker import NullFormatter, StrMethodFormatter

    figure = Figure(figsize=(8, 5), dpi=150, layout="constrained")
    axes = figure.subplots()
    for policy in dict.fromkeys((*_COLOURS, *(row.policy for row in rows))):
        of_policy = [row for row in rows if row.policy == policy]
        if not of_policy:
            continue
        x = [row.gets / analysis.shape.num_samples for row in of_policy]
        axes.plot(
            x,
            [row.co_batch for row in of_policy],
            "o-",
            color=_COLOURS.get(policy, _OTHER_COLOUR),
            label=_legend(policy),
        )
        offset, horizontal, vertical = _LABELS_AT.get(policy, _LABELS_AT["redox"])
        for row, place in zip(of_policy, x, strict=True):
            axes.annotate(
                _label(row),
                (place, row.co_batch),
                xytext=offset,
                textcoords="offset points",
                ha=horizontal,
                va=vertical,
                color=_COLOURS.get(policy, _OTHER_COLOUR),
                fontweight="bold" if (policy, row.chunk_size) == recommended else "normal",
            )
    axes.set_xscale("log")
    axes.set_yscale("log")
    most = max(row.co_batch for row in rows)
    least = min(row.co_batch for row in rows)
    axes.set_ylim(least / 1.25, most * 1.4)
    axes.margins(x=0.12)
    axes.axhspan(
        least / 1.25, MOST_CO_BATCH, color="#2ca02c", alpha=0.08, lw=0, label=f"co-batch at most {MOST_CO_BATCH}"
    )
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(StrMethodFormatter("{x:g}"))
        axis.set_minor_formatter(NullFormatter())
    ticks = (0.1, 0.2, 0.5, 1, 1.5, 2, 3, 5, 10, 20, 50)
    axes.set_yticks([tick for tick in ticks if least / 1.25 <= tick <= most * 1.4])
    axes.grid(True, which="major", alpha=0.25)
    axes.set_xlabel("GETs per sample (fewer: cheaper)")
    axes.set_ylabel("co-batch ratio of chunk-mates (1: uniform shuffle)")
    axes.set_title(
        f"{analysis.shape.num_samples:,} samples, {bytes_text(analysis.shape.total_bytes)}; memory"
        f" {analysis.memory_fraction():.1%} over {analysis.num_pods} pod{'s' * (analysis.num_pods > 1)}",
        fontsize=10,
    )
    axes.legend(loc="upper right", fontsize=8)
    try:
        figure.savefig(path)
    except OSError as error:
        raise RefillError(f"can't write the plot to {path}: {error.strerror}") from error


def _legend(policy: str) -> str:
    if policy == "none":
        return "no cache: a GET for every sample"
    return f"{policy}: {POLICIES[policy].label}"


def _label(row: Row) -> str:
    if row.policy == "none":
        return "no cache"
    read = f"\n{row.read_amplification:.1f}x" if row.read_amplification > 1.05 else ""
    return f"K={row.chunk_size}{read}"
