"""Diversity-preserving RFT and evaluation. Where a policy is needed it is a toy, judged by a stand-in (see toy_rl)."""

from __future__ import annotations

import pandas as pd
import pytest
from toy_rl import HashJudge, toy_feedback, toy_policy, toy_tasks

from musalib.store import read_jsonl
from musalib.training.diversity import Structure, choose_pool
from musalib.training.evaluation import evaluate_policy, summarize, task_values
from musalib.training.policies import load_policy
from musalib.training.rft import RFTConfig, pool_records, train_rft
from musalib.training.sft import SFTStageConfig

MODULE = '''import torch
cpp_source = r"""
{source}
"""
class ModelNew(torch.nn.Module):
    def forward(self, x):
        return ext.run(x)
'''


def module(body, before=""):
    return MODULE.format(source=f"{before}torch::Tensor run(torch::Tensor x) {{\n{body}\nreturn x;\n}}")


FLAT = module("for (int i = 0; i < n; ++i) { b[i] = std::max(a[i], 0.0f); }")
RENAMED = module("for (int k = 0;  k < size; ++k) { out[k] = std::max(in[k], 0.1f); } // same thing")
TERNARY = module("for (int i = 0; i < n; ++i) { b[i] = a[i] > 0.0f ? a[i] : 0.0f; }")
NESTED = module("for (int r = 0; r < m; ++r)\nfor (int i = 0; i < n; ++i) { b[i] = std::max(a[i], 0.0f); }")
TWO_PASSES = module(
    "for (int i = 0; i < n; ++i) { b[i] = a[i]; }\nfor (int i = 0; i < n; ++i) { b[i] = std::max(b[i], 0.0f); }"
)
KERNEL = module(
    "work(a, b);", "void work(const float* a, float* b) {\nfor (int i = 0; i < n; ++i) { b[i] = a[i]; }\n}\n"
)
SWAPPED = module("for (int i = 0; i < n; ++i) { b[i] = std::max(0.0f, a[i]); }")
DOUBLE_SUM = module("double s = 0; for (int i = 0; i < n; ++i) { s += a[i]; }")
FLOAT_SUM = module("float s = 0; for (int i = 0; i < n; ++i) { s += a[i]; }")


def test_structure_sees_loops_functions_and_reductions():
    assert Structure.of(FLAT).loops == "for()"
    assert Structure.of(NESTED).loops == "for>for()"
    assert Structure.of(TWO_PASSES).loops == "for()for()"
    assert Structure.of(TERNARY).loops == "for(?)"
    assert (Structure.of(FLAT).functions, Structure.of(KERNEL).functions) == (1, 2)
    assert Structure.of(DOUBLE_SUM).reduction == ("+=", "double")
    assert Structure.of(FLOAT_SUM).reduction == ("+=",)
    fenced = f"Here it is:\n```python\n{FLAT}```\n"
    assert Structure.of(fenced) == Structure.of(FLAT)
    cuda = module("__shared__ float t[32]; atomicAdd(&s, t[0]); run_kernel<<<grid, 256>>>(a);")
    assert Structure.of(cuda).shared_memory and "atomic" in Structure.of(cuda).reduction
    assert Structure.of(cuda).launch != Structure.of(FLAT).launch
    assert Structure.of("not python (") == Structure.of("not python (")


def test_pool_holds_one_of_each_kind_and_fills_up_with_near_ones():
    kinds = [FLAT, NESTED, TWO_PASSES, TERNARY, KERNEL]
    assert choose_pool([FLAT, RENAMED, FLAT]) == [FLAT]  # a renamed copy is no second positive
    assert set(choose_pool([*kinds, SWAPPED])) == set(kinds)  # enough kinds: no second one of the same
    assert set(choose_pool([FLAT, SWAPPED, NESTED])) == {FLAT, SWAPPED, NESTED}  # too few: near ones count
    assert choose_pool([FLAT, SWAPPED, NESTED], min_pool=2) == [FLAT, NESTED]
    assert len(choose_pool([*kinds, DOUBLE_SUM, FLOAT_SUM], max_pool=3)) == 3
    assert choose_pool([]) == []


def test_pool_records_are_what_sft_trains_on():
    tasks = toy_tasks(2)
    records = pool_records(tasks, {"toy1": [FLAT, NESTED]}, RFTConfig())
    assert [r["task"]["id"] for r in records] == ["toy1"]
    assert records[0]["pool"] == [FLAT, NESTED] and records[0]["clusters"] == 2
    assert records[0]["completion"] == [{"role": "assistant", "content": FLAT}]
    with pytest.raises(ValueError, match="min_pool <= max_pool"):
        RFTConfig(min_pool=5, max_pool=4)


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    return toy_policy(tmp_path_factory.mktemp("policy"))


def evaluate(policy, path, judge, **settings):
    settings = {"n": 3, "max_new_tokens": 8, "write_feedback": toy_feedback} | settings
    return evaluate_policy(policy, toy_tasks(40), judge, path, **settings)


def test_evaluation_continues_after_a_kill_with_the_same_rows(policy, tmp_path):
    straight = evaluate(policy, tmp_path / "straight.jsonl", HashJudge(), max_turns=2)
    with pytest.raises(KeyboardInterrupt):
        evaluate(policy, tmp_path / "killed.jsonl", HashJudge(stop_at_call=5), max_turns=2)
    torn = tmp_path / "killed.jsonl"
    torn.write_text(torn.read_text()[:-20])  # the last write was cut short
    resumed = evaluate(policy, torn, HashJudge(), max_turns=2)
    pd.testing.assert_frame_equal(straight, resumed)
    assert sorted(straight["sample"].unique()) == [-1, 0, 1, 2]
    assert (straight[straight["sample"] == -1]["turn"] == 1).all() and straight["turn"].max() == 2
    judge = HashJudge()
    evaluate(policy, torn, judge, max_turns=2)
    assert judge.calls == 0
    with pytest.raises(ValueError, match="seed: 0 -> 3"):
        evaluate(policy, torn, judge, max_turns=2, seed=3)


def test_machine_faults_are_tried_again_and_left_out(policy, tmp_path):
    path = tmp_path / "eval.jsonl"
    faulty = evaluate(policy, path, HashJudge(kinds=("ok", "infra:worker")), greedy=False)
    share = summarize(faulty)
    assert share["avg_at_3"]["mean"] == 1.0 and share["infra"] > 0
    again = evaluate(policy, path, HashJudge(kinds=("ok", "runtime_error:crash")), greedy=False)
    assert summarize(again)["infra"] == 0 and 0 < summarize(again)["avg_at_3"]["mean"] < 1


def test_summary_by_hand():
    def row(task, sample, turn, category, speedup=None):
        return {"task": task, "sample": sample, "turn": turn, "depth": 1 if task == "a" else 2, "category": category,
                "success": category == "ok", "speedup": speedup}  # fmt: skip

    frame = pd.DataFrame(
        [
            row("a", -1, 1, "ok"),
            row("a", 0, 1, "ok", 1.5),
            row("a", 1, 1, "compile_error"),
            row("a", 1, 2, "ok", 3.0),
            row("b", -1, 1, "compile_error"),
            row("b", 0, 1, "compile_error"),
            row("b", 0, 2, "compile_error"),
            row("b", 1, 1, "infra:worker"),
        ]
    )
    values = task_values(frame)
    assert values.loc["a"].to_dict() == {
        "pass_at_2": 1.0, "avg_at_2": 0.5, "faster_rate": 0.5, "acc_first": 0.5, "acc_best": 1.0, "greedy": 1.0,
    }  # fmt: skip
    assert values.loc["b"].to_dict() == dict.fromkeys(values.columns, 0.0)
    summary = summarize(frame)
    assert summary["pass_at_2"]["mean"] == 0.5 and summary["tasks"] == 2 and summary["infra"] == 1
    assert summary["by_depth"]["1"]["acc_best"]["mean"] == 1.0
    assert summary["pass_at_2"]["low"] <= 0.5 <= summary["pass_at_2"]["high"]


def test_rft_trains_on_what_passed(policy, tmp_path):
    config = RFTConfig(samples_per_task=4, max_new_tokens=8)
    training = SFTStageConfig(steps=2, batch_size=4, max_length=256, save_every=2)
    folder = train_rft(
        policy, toy_tasks(6), HashJudge(), tmp_path, config, training, write_feedback=toy_feedback
    )
    load_policy(folder)
    passed = {(r["task"], r["response"]) for r in read_jsonl(tmp_path / "samples.jsonl") if r["success"]}
    pools = {(r["task"]["id"], text) for r in read_jsonl(tmp_path / "pools.jsonl") for text in r["pool"]}
    assert pools and pools <= passed
    with pytest.raises(ValueError, match="none of 24 samples passed"):
        judge = HashJudge(kinds=("compile_error:cpp",))
        train_rft(
            policy, toy_tasks(6), judge, tmp_path / "none", config, training, write_feedback=toy_feedback
        )
