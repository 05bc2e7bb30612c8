"""The figures and tables of a run, and `musalib figures`, which draws figures/ again from its committed csv files."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pandas as pd

from musalib import plots, runs, store, tables

if TYPE_CHECKING:
    from musalib.stage import Stage
    from musalib.tables import Evaluation

STAGE = "08_ablations"  # the notebook whose artefacts hold the tables of all figures
SOURCE = "source.json"  # run, seed, commit and device of the numbers


def figures_root() -> Path:
    return runs.repository_root() / "figures"


def rebuild(run: str | None = None) -> list[Path]:
    """Draw every figure; the files written. RunError when the run is not there or has no tables yet."""
    folder = figures_root()
    if run is not None:
        publish(run)
    tables = [path for name in plots.FIGURES if (path := folder / f"{name}.csv").exists()]
    if not tables:
        raise runs.RunError(
            "figures/ holds no tables yet; make them with `musalib run`, or name one: --run NAME"
        )
    written = []
    for path in tables:
        plots.draw(path.stem, plots.read_table(path), folder)
        written += [path.with_suffix(suffix) for suffix in (".csv", ".svg", ".pdf", ".png")]
    return written


def write(
    stage: Stage,
    found: dict[str, Evaluation],
    controls: dict[str, Evaluation],
    more_rft: dict[str, Evaluation],
) -> dict[str, Path]:
    """Tables and figures of the run, in its folder and, where the profile says so, in figures/ too."""
    folder = stage.folder / "figures"
    rows = [tables.stage_rows(found), tables.stage_rows(controls, "control")]
    plots.draw("fig_stages", pd.concat(rows, ignore_index=True), folder)
    plots.draw("fig_rl_curves", tables.rl_curves(stage.run), folder)
    for name, table in (
        ("tab_stages", tables.stage_table(found)),
        ("tab_gains", tables.gain_table(found, controls, more_rft)),
    ):
        store.write_text(folder / f"{name}.csv", table.to_csv())
        store.write_text(folder / f"{name}.md", tables.markdown(table))
    source = {"run": stage.run, "profile": stage.profile.name, "seed": stage.seed, **runs.environment()}
    store.write_json(folder / SOURCE, source)
    if stage.profile.publish:
        publish(stage.run)
        folder = figures_root()
    results = {"table": folder / "tab_stages.md", "figure": folder / "fig_stages.png"}
    shown = {name: str(path) for name, path in results.items()}
    store.write_json(stage.folder.parent / "results.json", shown)
    return results


def publish(run: str) -> list[Path]:
    """Copy a run's tables and figures to figures/; the files written."""
    source = runs.artifacts_of(run, STAGE) / "figures"
    if not (source / SOURCE).exists():
        raise runs.RunError(f"run {run!r} has no figures yet; finish it: musalib run --run {run}")
    folder = figures_root()
    written = []
    for path in sorted(source.iterdir()):
        with store.replacing(folder / path.name) as temporary:
            shutil.copyfile(path, temporary)
        written.append(folder / path.name)
    return written
