"""One function per figure, from the plotted table to a matplotlib Figure; saving and theme are apart.

A table is a plain DataFrame, written as csv beside the picture; the picture is drawn from what that csv holds, so
that the same csv always gives the same bytes (fixed svg ids, no dates).
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import matplotlib
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from musalib import store

WIDE_IN = 6.75
# seaborn's `colorblind` palette: one colour and one marker per quantity in every figure
BLUE, ORANGE, GREEN, GREY = "#0173b2", "#de8f05", "#029e73", "#767676"
METRICS = {
    "pass_at_k": ("Pass@{k}", ORANGE, "s"),
    "greedy": ("greedy", GREEN, "^"),
    "avg_at_k": ("Avg@{k}", BLUE, "o"),
}
STAGES = {
    "base": "base",
    "sft": "SFT",
    "rft": "RFT",
    "rl_single": "RL single",
    "rl_multi": "RL multi",
}
STYLE = {
    "font.size": 8,
    "font.family": "DejaVu Sans",
    "axes.titlesize": 8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "grid.color": "#dddddd",
    "grid.linewidth": 0.6,
    "axes.axisbelow": True,
    "legend.frameon": False,
    "lines.linewidth": 1.2,
    "lines.markersize": 4.5,
    "figure.dpi": 150,
    "savefig.dpi": 300,
    "svg.hashsalt": "musalib",
    "svg.fonttype": "none",
    "pdf.fonttype": 42,
}


@contextmanager
def theme() -> Iterator[None]:
    """The library's look, whatever rc files or notebooks have set before."""
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(STYLE)
        yield


def fig_stages(table: pd.DataFrame) -> Figure:
    """Pass@k, Avg@k and greedy of every stage with 95 % intervals; one panel over all tasks, one per difficulty.

    Columns: stage, policy ("trained" or "control"), depth ("all", "1", ...), metric, value, low, high, k, tasks.
    Controls (the same training steps without a reward) show their Avg@k only.
    """
    depths = sorted(table["depth"].unique(), key=lambda d: (d != "all", d))
    with theme():
        figure = Figure(figsize=(WIDE_IN, 2.6), layout="constrained")
        ratios = [2.2 if depth == "all" else 1.0 for depth in depths]
        panels = figure.subplots(1, len(depths), sharey=True, squeeze=False, width_ratios=ratios)[0]
        for depth, axes in zip(depths, panels, strict=True):
            part = table[table["depth"] == depth]
            _stage_panel(axes, part)
            title = "all tasks" if depth == "all" else f"depth {depth}"
            axes.set_title(f"{title}\n{part['tasks'].max()} tasks")
        panels[0].set_ylabel("verified on held-out tasks (%)")
        panels[0].set_ylim(0, 102)
        handles, labels = panels[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=len(labels))
    return figure


def _stage_panel(axes: Axes, part: pd.DataFrame) -> None:
    position = {stage: i for i, stage in enumerate(STAGES)}
    trained = part[part["policy"] == "trained"]
    for shift, (metric, (label, colour, marker)) in zip((-0.12, 0.0, 0.12), METRICS.items(), strict=True):
        rows = trained[trained["metric"] == metric]
        if rows.empty:
            continue
        label = label.format(k=rows["k"].iloc[0])
        _interval_line(axes, rows, position, shift, label=label, color=colour, marker=marker)
    control = part[(part["policy"] == "control") & (part["metric"] == "avg_at_k")]
    if not control.empty:
        label = f"Avg@{control['k'].iloc[0]}, control without reward"
        _interval_line(axes, control, position, 0.22, label=label, color=GREY, marker="x", linestyle="none")
    axes.set_xticks(
        range(len(STAGES)), list(STAGES.values()), rotation=45, ha="right", rotation_mode="anchor"
    )
    axes.set_xlim(-0.5, len(STAGES) - 0.5)


def _interval_line(
    axes: Axes, rows: pd.DataFrame, position: dict[str, int], shift: float, **style: object
) -> None:
    rows = rows.sort_values("stage", key=lambda column: column.map(position))
    x = rows["stage"].map(position) + shift
    below, above = rows["value"] - rows["low"], rows["high"] - rows["value"]
    errors = [100 * below.clip(lower=0), 100 * above.clip(lower=0)]
    axes.errorbar(x, 100 * rows["value"], yerr=errors, elinewidth=0.8, capsize=1.5, **style)


def fig_rl_curves(table: pd.DataFrame, window: int = 10) -> Figure:
    """Share of passing first answers per RL step: thin raw line, and its trailing mean over `window` steps.

    Columns: stage ("rl_single", "rl_multi"), step, pass_rate, entropy.
    """
    stages = [stage for stage in STAGES if stage in set(table["stage"])]
    with theme():
        figure = Figure(figsize=(WIDE_IN, 2.2), layout="constrained")
        passes, entropy = figure.subplots(1, 2)
        for stage, colour, dash in zip(stages, (BLUE, ORANGE), ("-", "--"), strict=False):
            rows = table[table["stage"] == stage].sort_values("step")
            for axes, column, scale in ((passes, "pass_rate", 100), (entropy, "entropy", 1)):
                values = scale * rows[column]
                axes.plot(rows["step"], values, color=colour, linewidth=0.5, alpha=0.45)
                smooth = values.rolling(window, min_periods=1).mean()
                axes.plot(rows["step"], smooth, dash, color=colour, label=STAGES[stage])
        passes.set_ylabel("first answers that pass (%)")
        entropy.set_ylabel("entropy (nats per token)")
        passes.set_ylim(0, 102)
        entropy.set_ylim(bottom=0)
        for axes in (passes, entropy):
            axes.set_xlabel("optimiser step")
        passes.set_title(f"training tasks; bold: mean of the last {window} steps")
        passes.legend(loc="lower right")
    return figure


FIGURES: dict[str, Callable[[pd.DataFrame], Figure]] = {
    "fig_stages": fig_stages,
    "fig_rl_curves": fig_rl_curves,
}


def read_table(path: str | Path) -> pd.DataFrame:
    """A figure's csv; columns that name things stay text."""
    return pd.read_csv(path, dtype={"depth": str, "stage": str, "metric": str, "policy": str})


def draw(name: str, table: pd.DataFrame, folder: str | Path) -> Figure:
    """Write `<name>.csv` and draw it to .svg, .pdf and .png in `folder`; returns the figure."""
    folder = Path(folder)
    store.write_text(folder / f"{name}.csv", table.to_csv(index=False, float_format="%.6g"))
    figure = FIGURES[name](read_table(folder / f"{name}.csv"))
    for suffix in ("svg", "pdf", "png"):
        with store.replacing(folder / f"{name}.{suffix}") as temporary:
            temporary.write_bytes(rendered(figure, suffix))
    return figure


def rendered(figure: Figure, suffix: str) -> bytes:
    """The picture as a file's content, without dates or versions."""
    metadata = {"svg": {"Date": None}, "pdf": {"CreationDate": None}, "png": {"Software": None}}[suffix]
    buffer = io.BytesIO()
    with theme():
        figure.savefig(buffer, format=suffix, metadata=metadata)
    return buffer.getvalue()


def show(figure: Figure) -> None:
    """Put the figure into the notebook as a png, which every viewer can show."""
    from IPython.display import Image, display

    display(Image(data=rendered(figure, "png"), width=round(figure.get_figwidth() * 120)))
