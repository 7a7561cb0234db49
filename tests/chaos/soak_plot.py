"""What does a soak look like? Memory and file descriptors of each pod over time, as one SVG."""

from __future__ import annotations

from pathlib import Path

import matplotlib
from tests.chaos.pod_samples import PodSample

__all__ = ["plot"]

_COLOURS = ("#4269d0", "#efb118", "#ff725c", "#6cc5b0")


def plot(samples: list[PodSample], path: Path) -> None:
    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "refill"
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(3, 1, figsize=(8, 7), sharex=True, layout="constrained")
    for pod in sorted({sample.pod for sample in samples}):
        of_pod = [sample for sample in samples if sample.pod == pod]
        for life in sorted({sample.life for sample in of_pod}):
            of_life = [sample for sample in of_pod if sample.life == life]
            minutes = [sample.seconds / 60 for sample in of_life]
            values = (
                [sample.rss_bytes / 1e6 for sample in of_life],
                [sample.samples_bytes / 1e6 for sample in of_life],
                [sample.file_descriptors for sample in of_life],
            )
            for row, line in zip(axes, values, strict=True):
                label = f"pod {pod}" if life == 0 else None
                row.plot(minutes, line, color=_COLOURS[pod % len(_COLOURS)], linewidth=1, label=label)
                if life:
                    row.axvline(minutes[0], color=_COLOURS[pod % len(_COLOURS)], linewidth=0.6, linestyle=":")
    for row, title in zip(axes, ("resident set, MB", "memory for samples, MB", "file descriptors"), strict=True):
        row.set_ylabel(title)
        row.set_ylim(bottom=0)
        row.grid(alpha=0.3)
    axes[0].legend(loc="lower right", ncols=3)
    axes[-1].set_xlabel("minutes; dotted: the pod was killed and came back")
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)
