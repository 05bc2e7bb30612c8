"""What the pipeline notebooks do, stage by stage: read the stage before, train, evaluate, write artefacts.

Every function may be called again after a kill: training continues from its newest checkpoint, evaluation from
its last row, and what is finished is returned as it is.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from musalib import profiles, store, tables
from musalib.parameters import UsageError
from musalib.stage import DATA, Stage
from musalib.tasks import Task, load_tasks

if TYPE_CHECKING:
    from musalib.mooreeval import EvalConfig
    from musalib.training.sft import SFTStageConfig


def make_data(stage: Stage) -> dict[str, Any]:
    """Notebook 02: the four disjoint task sets, the unverified base corpus and the verified SFT corpus."""
    from musalib.synthesis.corpora import DataConfig, build_data

    profile = stage.profile
    config = DataConfig(
        seed=stage.seed,
        base_answers=profile.base_samples,
        base_dialogues=profile.base_dialogues,
        base_checked=profile.base_checked,
        sft_answers=profile.sft_samples,
        rl_tasks=profile.rl_tasks,
        tune_tasks=profile.tune_tasks,
        final_tasks=profile.eval_tasks,
    )
    with stage.evaluator() as evaluator:
        return build_data(stage.folder / "data", config, evaluator, profile.backend)


def make_base_policy(stage: Stage) -> Path:
    """Notebook 02: tokenizer and a small Llama trained on the unverified corpus; the stand-in for a pretrained model."""
    from musalib.training.policies import TinyPolicyConfig, build_policy, build_tokenizer, save_policy

    profile = stage.profile
    records = stage.records(DATA, "data/base_corpus.jsonl")
    start = stage.folder / "start"
    if not (start / "config.json").exists():
        texts = [message["content"] for r in records for message in (*r["prompt"], *r["completion"])]
        tokenizer = build_tokenizer(texts, profile.vocabulary)
        config = TinyPolicyConfig(
            hidden=profile.hidden,
            layers=profile.layers,
            heads=profile.heads,
            ffn=profile.feed_forward,
            vocab=profile.vocabulary,
            max_length=profile.max_length,
        )
        with store.replacing_folder(start) as temporary:
            save_policy(build_policy(tokenizer, config, stage.seed), tokenizer, temporary)
    return supervise(stage, start, records, "base", stage.folder / "base")


def supervise(stage: Stage, policy: Path, records: Sequence[dict], size: str, folder: Path) -> Path:
    from musalib.training.sft import train_sft

    return train_sft(policy, records, folder, supervised_config(stage.profile, size, stage.seed))


def supervised_config(profile: profiles.Profile, size: str, seed: int) -> SFTStageConfig:
    """The profile's `<size>_steps`, `<size>_batch` and `<size>_learning_rate`; for RL sizes, its responses per step."""
    from musalib.training.sft import SFTStageConfig

    values = profiles.sizes(profile, f"{size}_")
    batch = values.get(f"{size}_batch") or values[f"{size}_prompts"] * values[f"{size}_group"]
    return SFTStageConfig(
        steps=values[f"{size}_steps"],
        batch_size=batch,
        learning_rate=values[f"{size}_learning_rate"],
        warmup_steps=min(40 if size == "base" else 10, values[f"{size}_steps"] // 4),
        max_length=profile.max_length,
        seed=seed,
    )


def run_sft(stage: Stage) -> Path:
    """Notebook 03: the base policy on answers that passed the verifier."""
    base = stage.input(DATA, "base/policy")
    return supervise(stage, base, stage.records(DATA, "data/sft_corpus.jsonl"), "sft", stage.folder)


def run_rft(stage: Stage) -> Path:
    """Notebook 04: sample from the SFT policy, keep diverse verified positives, train on a random one per epoch."""
    from musalib.training.rft import RFTConfig, train_rft

    profile = stage.profile
    config = RFTConfig(
        samples_per_task=profile.rft_samples,
        max_new_tokens=profile.max_new_tokens,
        seed=stage.seed,
        backend=profile.backend,
    )
    tasks = stage.tasks("rl")[: profile.rft_tasks]
    with stage.evaluator() as evaluator:
        training = supervised_config(profile, "rft", stage.seed)
        return train_rft(stage.input("03_sft", "policy"), tasks, evaluator, stage.folder, config, training)


def run_rl_single(stage: Stage) -> Path:
    """Notebook 05: single-turn GRPO from the RFT policy."""
    profile = stage.profile
    sizes = {
        "steps": profile.rl_steps,
        "prompts_per_step": profile.rl_prompts,
        "group_size": profile.rl_group,
        "learning_rate": profile.rl_learning_rate,
    }
    return reinforce(stage, stage.input("04_rft", "policy"), sizes)


def run_rl_multi(stage: Stage) -> Path:
    """Notebook 06: multi-turn GRPO with PrimeEcho and Buffered Dynamic Retry, from the single-turn policy."""
    profile = stage.profile
    sizes = {
        "steps": profile.multi_steps,
        "prompts_per_step": profile.multi_prompts,
        "group_size": profile.multi_group,
        "learning_rate": profile.multi_learning_rate,
        "max_turns": profile.multi_turns,
        "alpha": profile.alpha,
        "p_buf": profile.retry_share,
        "retry_capacity": profile.retry_capacity,
        "retry_start_step": profile.multi_steps // 3,  # once there is something worth repairing
    }
    return reinforce(stage, stage.input("05_rl_single_turn", "policy"), sizes)


def reinforce(stage: Stage, policy: Path, sizes: dict[str, Any]) -> Path:
    from musalib.training.grpo import GRPOStageConfig, train_grpo

    config = GRPOStageConfig(
        seed=stage.seed,
        delta=stage.profile.mirror_pop_delta,
        max_new_tokens=stage.profile.max_new_tokens,
        backend=stage.profile.backend,
        warmup_steps=min(10, sizes["steps"] // 4),
        **sizes,
    )
    with stage.evaluator() as evaluator:
        tasks = stage.tasks("rl")[stage.profile_of("04_rft").rft_tasks :]  # those before were RFT's
        return train_grpo(policy, tasks, evaluator, stage.folder, config)


# --- controls: the same steps without a reward ---------------------------------------------------------------

BASE_CORPUS, SFT_CORPUS = (DATA, "data/base_corpus.jsonl"), (DATA, "data/sft_corpus.jsonl")
SINGLE, MULTI = ("04_rft", "policy"), ("05_rl_single_turn", "policy")
POOLS = ("04_rft", "pools.jsonl")
# stage -> its folder, the policy it starts from, data that no answer of the policy was rewarded for, its sizes
CONTROLS = {
    "sft": ("03_sft", (DATA, "base/policy"), BASE_CORPUS, "sft"),
    "rft": ("04_rft", ("03_sft", "policy"), SFT_CORPUS, "rft"),
    "rl_single": ("05_rl_single_turn", SINGLE, SFT_CORPUS, "rl"),
    "rl_multi": ("06_rl_multi_turn", MULTI, SFT_CORPUS, "multi"),
}
# not without reward, but the harder question: what the same steps on RFT's verified pools would have given
MORE_RFT = {
    "rl_single": ("05_rl_single_turn", SINGLE, POOLS, "rl"),
    "rl_multi": ("06_rl_multi_turn", MULTI, POOLS, "multi"),
}


def run_controls(stage: Stage, kind: str) -> dict[str, tables.Evaluation]:
    """Train and evaluate the controls of one kind, "control" or "more_rft": stage -> evaluation.

    Each starts where its stage starts and takes the same number of steps of as many sequences.
    """
    from musalib.training.sft import train_sft

    found = {}
    for of, (folder, start, data, size) in {"control": CONTROLS, "more_rft": MORE_RFT}[kind].items():
        config = supervised_config(stage.profile_of(folder), size, stage.seed)
        name = f"{kind}_{of}"
        policy = train_sft(stage.input(*start), stage.records(*data), stage.folder / name, config)
        evaluate(stage, policy, f"eval_{name}", repairs=False)
        found[of] = tables.Evaluation(stage.folder / f"eval_{name}.jsonl")
        print(name, tables.percent(found[of].interval("avg_at_k")), flush=True)
    return found


# --- evaluation --------------------------------------------------------------------------------------------


def evaluate(stage: Stage, policy: Path, name: str = "eval", repairs: bool = True) -> None:
    """The policy on the final set, which nothing was tuned on; rows in `<name>.jsonl` of the stage's folder.

    With `repairs`, `eval_repairs` answers per task get up to `eval_turns` turns too: `<name>_turns.jsonl`.
    """
    from musalib.training.evaluation import evaluate_policy

    profile = stage.profile
    tasks = stage.tasks("final")
    settings = {"max_new_tokens": profile.max_new_tokens, "backend": profile.backend}
    with stage.evaluator(timing=repairs) as evaluator:
        path = stage.folder / f"{name}.jsonl"
        evaluate_policy(policy, tasks, evaluator, path, n=profile.eval_samples, **settings)
        if repairs:
            settings |= {"n": profile.eval_repairs, "max_turns": profile.eval_turns, "greedy": False}
            evaluate_policy(policy, tasks, evaluator, tables.turns_file(path), **settings)


def load_suite(suite: str, levels: set[int]) -> list[Task]:
    """Tasks of a .jsonl or .py file or of a folder of .py files; UsageError when nothing is left of them."""
    path = Path(suite)
    if not path.exists():
        raise UsageError(f"there is no suite {suite}: name a .jsonl or .py file or a folder of .py files")
    files = sorted(path.rglob("*.py")) if path.is_dir() else [path]
    tasks = [task for file in files for task in load_tasks(file)]
    kept = [task for task in tasks if not levels or task.level in levels]
    if not kept:
        raise UsageError(f"{suite} holds {len(tasks)} tasks, none of level {sorted(levels) or 'any'}")
    return kept


def evaluate_on_suite(
    policy: str, tasks: list[Task], backend: str, config: EvalConfig, k: int, seed: int, out: str | None
) -> dict[str, Any]:
    """`musalib evaluate`: summary of a policy on any suite; rows are kept in `out`, by default in the working directory."""
    from musalib.mooreeval import MooreEval
    from musalib.training.evaluation import evaluate_policy, summarize

    path = Path(out) if out else Path(f"{Path(policy).name or 'policy'}-eval.jsonl")
    with MooreEval(backend, config) as evaluator:
        frame = evaluate_policy(policy, tasks, evaluator, path, n=k, seed=seed, backend=backend)
    return json.loads(json.dumps({"policy": policy, "rows": str(path), **summarize(frame)}))
