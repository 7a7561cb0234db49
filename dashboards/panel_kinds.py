"""What do the panels of all dashboards look like? One function for each kind, and the frame around them.

A panel that is empty while all is well says so by a text for it (``quiet``); every other one has data whenever a job
runs, which tests hold it to.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count

from grafana_foundation_sdk.builders import common, dashboard, prometheus, stat, timeseries
from grafana_foundation_sdk.models import common as common_models
from grafana_foundation_sdk.models import dashboard as models

__all__ = ["CACHE", "JOB", "View", "figure", "graph"]

CACHE = 'job=~"$cache"'
"""Selects the pods of the caches that are looked at, by the name that Prometheus scrapes them under."""
JOB = CACHE + ', training_job=~"$training_job"'

_DASHED = [
    models.DynamicConfigValue("custom.stacking", {"mode": "none"}),
    models.DynamicConfigValue("custom.fillOpacity", 0),
    models.DynamicConfigValue("custom.lineStyle", {"fill": "dash", "dash": [8, 8]}),
]
_SOURCE = models.DataSourceRef(type_val="prometheus", uid="${datasource}")


@dataclass(frozen=True)
class View:
    """One dashboard: rows of panels under a heading each."""

    name: str
    title: str
    description: str
    rows: list[tuple[str, list[timeseries.Panel | stat.Panel]]]
    by_job: bool = True
    """Whether jobs can be chosen."""
    price: bool = False
    """Whether the price of a request is asked for."""

    def build(self) -> models.Dashboard:
        board = (
            dashboard.Dashboard(self.title)
            .uid(f"refill-{self.name}")
            .description(self.description)
            .tags(["refill"])
            .refresh("10s")
            .time("now-30m", "now")
            .tooltip(models.DashboardCursorSync.CROSSHAIR)
            .link(
                dashboard.DashboardLink("refill")
                .type(models.DashboardLinkType.DASHBOARDS)
                .tags(["refill"])
                .keep_time(True)
                .include_vars(True)
            )
            .with_variable(dashboard.DatasourceVariable("datasource").label("Data source").type("prometheus"))
            .with_variable(_labels("cache", "Cache", "label_values(refill_jobs, job)"))
        )
        if self.by_job:
            board.with_variable(_labels("training_job", "Job", f"label_values(refill_epoch{{{CACHE}}}, training_job)"))
        if self.price:
            price = dashboard.TextBoxVariable("price").label("Price of 1,000 GETs").default_value("0.0004")
            board.with_variable(price)
        ids = count(1)
        for heading, panels in self.rows:
            board.with_row(dashboard.Row(heading).id(next(ids)))
            for panel in panels:
                board.with_panel(panel.id(next(ids)))
        return board.build()


def graph(
    title: str,
    unit: str,
    description: str,
    *queries: tuple[str, str],
    stacked: bool = False,
    limit: str = "",
    most: float | None = None,
    bad_from: float | None = None,
    quiet: str = "",
) -> timeseries.Panel:
    """Lines over time.

    :param queries: ``(query, legend)`` each.
    :param limit: legend of a line that the others are to stay below: dashed, and on no stack.
    :param most: upper end of the axis.
    :param bad_from: where red begins.
    """
    panel = (
        timeseries.Panel()
        .title(title)
        .description(description)
        .datasource(_SOURCE)
        .unit(unit)
        .min(0)
        .height(8)
        .span(8)
        .line_width(1)
        .fill_opacity(60 if stacked else 8)
        .show_points(common_models.VisibilityMode.NEVER)
        .tooltip(common.VizTooltipOptions().mode(common_models.TooltipDisplayMode.MULTI))
        .legend(
            common.VizLegendOptions()
            .display_mode(common_models.LegendDisplayMode.LIST)
            .placement(common_models.LegendPlacement.BOTTOM)
            .show_legend(True)
        )
    )
    if stacked:
        panel.stacking(common.StackingConfig().mode(common_models.StackingMode.NORMAL))
    if limit:
        panel.override_by_name(limit, _DASHED)
    if most is not None:
        panel.max(most)
    if bad_from is not None:
        panel.thresholds(_red_from(bad_from))
        style = common_models.GraphTresholdsStyleMode.DASHED
        panel.thresholds_style(common.GraphThresholdsStyleConfig().mode(style))
    if quiet:
        panel.no_value(quiet)
    for number, (query, legend) in enumerate(queries):
        panel.with_target(_target(number, query, legend))
    return panel


def figure(title: str, unit: str, description: str, query: str, legend: str = "") -> stat.Panel:
    """A number for each job or pod, as it is now."""
    return (
        stat.Panel()
        .title(title)
        .description(description)
        .datasource(_SOURCE)
        .unit(unit)
        .height(4)
        .span(6)
        .color_mode(common_models.BigValueColorMode.NONE)
        .graph_mode(common_models.BigValueGraphMode.NONE)
        .reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]))
        .with_target(_target(0, query, legend or "{{job}}: {{training_job}}").instant())
    )


def _target(number: int, query: str, legend: str) -> prometheus.Dataquery:
    query = " ".join(query.split())
    return prometheus.Dataquery().expr(query).legend_format(legend).ref_id(chr(ord("A") + number)).datasource(_SOURCE)


def _labels(name: str, label: str, query: str) -> dashboard.QueryVariable:
    everything = models.VariableOption(text="All", value="$__all")
    return (
        dashboard.QueryVariable(name)
        .label(label)
        .datasource(_SOURCE)
        .query(query)
        .refresh(models.VariableRefresh.ON_TIME_RANGE_CHANGED)
        .include_all(True)
        .all_value(".*")
        .multi(True)
        .current(everything)
    )


def _red_from(value: float) -> dashboard.ThresholdsConfig:
    steps = [models.Threshold(value=None, color="green"), models.Threshold(value=value, color="red")]
    return dashboard.ThresholdsConfig().mode(models.ThresholdsMode.ABSOLUTE).steps(steps)
