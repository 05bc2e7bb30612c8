"""Several finished runs of one profile side by side: does every stage beat its control on every seed?

    for s in 0 1 2; do musalib run --profile tiny --run seed$s -p seed=$s; done
    python benchmarks/seeds.py seed0 seed1 seed2 --out benchmarks/results/seeds.json

Reads the evaluations on the final set; trains nothing. Intervals are paired bootstraps over tasks within one seed;
the spread between seeds is what the rows show.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from rich.console import Console
from rich.table import Table

from musalib import runs, store, tables
from musalib.metrics import Interval
from musalib.plots import STAGES
from musalib.stages import CONTROLS, MORE_RFT


def points(ends: Interval) -> list[float]:
    return [round(100 * value, 2) for value in (ends.mean, ends.low, ends.high)]


def of_run(run: str) -> dict:
    found = tables.evaluations(run)
    folder = runs.artifacts_of(run, "08_ablations")
    kinds = {"over_control": ("control", CONTROLS), "over_more_rft": ("more_rft", MORE_RFT)}
    gains = {
        name: {
            stage: points(tables.gain(tables.Evaluation(folder / f"eval_{kind}_{stage}.jsonl"), found[stage]))
            for stage in stages
        }
        for name, (kind, stages) in kinds.items()
    }
    manifest = store.read_json(runs.folder_of(run) / "manifest.json")
    return {
        "run": run,
        "seed": manifest["parameters"].get("seed"),
        "commit": manifest.get("commit"),
        "device": manifest.get("device"),
        "versions": manifest.get("versions"),
        "wall_s": {name: stage.get("wall_s") for name, stage in manifest.get("stages", {}).items()},
        "tasks": len(found["base"].values),
        "samples_per_task": found["base"].k,
        "stages": {
            stage: {
                metric: points(evaluation.interval(metric)) for metric in ("pass_at_k", "avg_at_k", "greedy")
            }
            for stage, evaluation in found.items()
        },
        "rl_multi_over_sft": points(tables.gain(found["sft"], found["rl_multi"])),
        **gains,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", nargs="+")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    results = [of_run(run) for run in args.runs]
    if args.out:
        args.out.write_text(json.dumps(results, indent=1) + "\n")
    show = lambda v: f"{v[0]:+.1f} [{v[1]:+.1f}, {v[2]:+.1f}]"  # noqa: E731
    table = Table("Avg@k, percent or points", *args.runs)
    for stage in results[0]["stages"]:
        table.add_row(STAGES[stage], *(f"{r['stages'][stage]['avg_at_k'][0]:.1f}" for r in results))
    for name in ("over_control", "over_more_rft"):
        for stage in results[0][name]:
            table.add_row(
                f"{STAGES[stage]} {name.replace('_', ' ')}", *(show(r[name][stage]) for r in results)
            )
    table.add_row("last stage over SFT", *(show(r["rl_multi_over_sft"]) for r in results))
    Console().print(table)


if __name__ == "__main__":
    main()
