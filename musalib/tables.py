"""From the evaluations of a run to its tables: stages with intervals, gains over controls, RL curves."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pandas as pd

from musalib import runs, store
from musalib.metrics import Interval, bootstrap_interval, paired_bootstrap
from musalib.plots import STAGES

FOLDERS = {
    "base": "02_data_synthesis",
    "sft": "03_sft",
    "rft": "04_rft",
    "rl_single": "05_rl_single_turn",
    "rl_multi": "06_rl_multi_turn",
}
SHOWN = {  # figure of an evaluation -> heading
    "pass_at_k": "Pass@{k}",
    "avg_at_k": "Avg@{k}",
    "greedy": "greedy",
    "faster_rate": "faster than 1.1x",
    "acc_first": "first turn",
    "acc_best": "best turn",
}


def turns_file(path: Path) -> Path:
    """Where the multi-turn rows beside an evaluation's file are."""
    return path.with_name(f"{path.stem}_turns.jsonl")


class Evaluation:
    """One evaluation's value per task and figure: frame [task, figure] with `k` samples per task.

    First and best turn come from the few samples that were repaired, where there are any.
    """

    def __init__(self, path: Path) -> None:
        from musalib.training.evaluation import read_evaluation, task_values

        frame = read_evaluation(path)
        self.k = int(frame["sample"].max()) + 1
        names = {f"pass_at_{self.k}": "pass_at_k", f"avg_at_{self.k}": "avg_at_k"}
        self.values = task_values(frame).rename(columns=names).drop(columns=["acc_first", "acc_best"])
        if turns_file(path).exists():
            turns = task_values(read_evaluation(turns_file(path)))
            self.values = self.values.join(turns[["acc_first", "acc_best"]])
        self.depth = frame.drop_duplicates("task").set_index("task")["depth"].map(lambda d: str(int(d)))

    def of_depth(self, depth: str) -> pd.DataFrame:
        return self.values if depth == "all" else self.values[self.depth[self.values.index] == depth]

    def interval(self, figure: str, depth: str = "all") -> Interval:
        """Mean over tasks; the interval resamples tasks within each difficulty."""
        values = self.of_depth(depth)[figure].dropna()
        return bootstrap_interval(values.to_dict(), self.depth[values.index].to_dict())


def stages_until(last: str) -> list[str]:
    return list(FOLDERS)[: list(FOLDERS).index(last) + 1]


def evaluations(run: str, until: str = "rl_multi") -> dict[str, Evaluation]:
    """Stage -> evaluation on the final set, for the stages up to `until` that have one."""
    paths = {stage: runs.artifacts_of(run, FOLDERS[stage]) / "eval.jsonl" for stage in stages_until(until)}
    return {stage: Evaluation(path) for stage, path in paths.items() if path.exists()}


def stage_rows(found: dict[str, Evaluation], policy: str = "trained") -> pd.DataFrame:
    """The long table of `plots.fig_stages`, one row per stage, difficulty and metric."""
    rows = []
    for stage, evaluation in found.items():
        for depth in ["all", *sorted(evaluation.depth.unique())]:
            tasks = len(evaluation.of_depth(depth))
            for metric in ("pass_at_k", "avg_at_k", "greedy"):
                ends = evaluation.interval(metric, depth)
                rows.append(
                    (stage, policy, depth, metric, ends.mean, ends.low, ends.high, evaluation.k, tasks)
                )
    columns = ["stage", "policy", "depth", "metric", "value", "low", "high", "k", "tasks"]
    return pd.DataFrame(rows, columns=columns)


def stage_table(found: dict[str, Evaluation]) -> pd.DataFrame:
    """The table people read: a row per stage, '54.1 [50.2, 58.0]' in percent."""
    rows = {}
    for stage, evaluation in found.items():
        figures = [f for f in SHOWN if f in evaluation.values.columns]
        cells = {SHOWN[f].format(k=evaluation.k): percent(evaluation.interval(f)) for f in figures}
        rows[STAGES[stage]] = cells
    return pd.DataFrame(rows).T.rename_axis("% of final tasks")


def gain_table(
    found: dict[str, Evaluation], controls: dict[str, Evaluation], more_rft: dict[str, Evaluation]
) -> pd.DataFrame:
    """Paired differences of Avg@k in points: to the stage before, to the control without reward, to more RFT."""
    stages, rows = list(found), {}
    for before, stage in itertools.pairwise(stages):
        cells = {"over the stage before": gain(found[before], found[stage])}
        if stage in controls:
            cells["control over the stage before"] = gain(found[before], controls[stage])
            cells["over its control"] = gain(controls[stage], found[stage])
        if stage in more_rft:
            cells["over as much more RFT"] = gain(more_rft[stage], found[stage])
        rows[STAGES[stage]] = {name: percent(ends, signed=True) for name, ends in cells.items()}
    return pd.DataFrame(rows).T.rename_axis("points of Avg@k")


def gain(before: Evaluation, after: Evaluation) -> Interval:
    values = [evaluation.values["avg_at_k"].astype(float).to_dict() for evaluation in (before, after)]
    return paired_bootstrap(*values, strata=before.depth.to_dict())


def percent(ends: Interval, signed: bool = False) -> str:
    sign = "+" if signed else ""
    return f"{100 * ends.mean:{sign}.1f} [{100 * ends.low:{sign}.1f}, {100 * ends.high:{sign}.1f}]"


def rl_curves(run: str, until: str = "rl_multi") -> pd.DataFrame:
    """The table of `plots.fig_rl_curves`, from the metrics of the RL stages up to `until`."""
    parts = []
    for stage in [s for s in stages_until(until) if s.startswith("rl_")]:
        frame = pd.DataFrame(store.read_jsonl(runs.artifacts_of(run, FOLDERS[stage]) / "metrics.jsonl"))
        frame = frame.rename(columns={"pass/first_turn": "pass_rate"}).assign(stage=stage)
        parts.append(frame[["stage", "step", "pass_rate", "entropy"]])
    return pd.concat(parts, ignore_index=True)


def task_set_table(report: dict[str, Any]) -> pd.DataFrame:
    """What notebook 02 drew: tasks per set, by depth, by family, and how many hold a rare operator."""
    rows = {}
    for name, found in report["tasks"].items():
        depths = {f"depth {depth}": count for depth, count in found["by_depth"].items()}
        rare = {"rare operator": found["with_rare_operator"]}
        rows[name] = {"tasks": found["count"], **depths, **found["by_family"], **rare}
    return pd.DataFrame(rows).T.fillna(0).astype(int).rename_axis("set")


def markdown(table: pd.DataFrame) -> str:
    """A table as GitHub markdown."""
    header = [str(table.index.name or ""), *map(str, table.columns)]
    lines = [header, ["---"] * len(header)]
    lines += [
        [str(name), *("" if pd.isna(v) else str(v) for v in row)]
        for name, row in zip(table.index, table.values, strict=True)
    ]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)
