"""The RL stages on a toy world (see toy_rl): real TRL trainers, a stand-in verifier that judges by a hash."""

from __future__ import annotations

import json
import math

import pytest
import torch
from safetensors.torch import load_file
from toy_rl import HashJudge, toy_feedback, toy_policy, toy_tasks

from musalib.reward import group_advantages
from musalib.stabilizers import prime_echo
from musalib.training.grpo import GRPOStageConfig, build_trainer, train_grpo
from musalib.training.policies import load_policy
from musalib.training.prompts import repair_messages, task_messages
from musalib.training.rollouts import fit_repair
from musalib.training.sampling import encode_prompt, generate, nucleus, sample_responses

SMALL = {
    "prompts_per_step": 2,
    "group_size": 4,
    "max_new_tokens": 10,
    "print_every": 100,
    "learning_rate": 1e-2,
}


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    return toy_policy(tmp_path_factory.mktemp("policy"))


def train(policy, out_dir, judge=None, **settings):
    config = GRPOStageConfig(**(SMALL | settings))
    return train_grpo(policy, toy_tasks(5), judge or HashJudge(), out_dir, config, toy_feedback)


def trainer_for(policy, out_dir, judge=None, **settings):
    config = GRPOStageConfig(**(SMALL | {"steps": 1, "checkpoint_every": 1} | settings))
    return build_trainer(policy, toy_tasks(5), judge or HashJudge(), out_dir, config, toy_feedback)


def one_batch(trainer):
    """What TRL would hand to the loss for the first rollout."""
    trainer.model.train()
    return trainer._generate_and_score_completions(next(iter(trainer.get_train_dataloader())))


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


# sampling ---------------------------------------------------------------------------------------------------


def test_a_response_does_not_depend_on_its_batch(policy):
    model, tokenizer = load_policy(policy)
    prompts = [task_messages(task) for task in toy_tasks(5)]
    together = generate(model, tokenizer, prompts, 3, 1.0, 1.0, 12, seed=7)
    apart = generate(model, tokenizer, prompts[3:], 3, 1.0, 1.0, 12, seed=7, batch_size=2)
    assert [s.token_ids for group in together[3:] for s in group] == [s.token_ids for g in apart for s in g]
    assert len({tuple(s.token_ids) for s in together[0]}) == 3
    other = generate(model, tokenizer, prompts[:1], 3, 1.0, 1.0, 12, seed=8)
    assert [s.token_ids for s in together[0]] != [s.token_ids for s in other[0]]


def test_greedy_is_what_transformers_generates_and_logprobs_are_the_models(policy):
    model, tokenizer = load_policy(policy)
    messages = [task_messages(task) for task in toy_tasks(2)]
    messages[1] = repair_messages(toy_tasks(2)[1], "no\n", "wrong\n")  # another length: left padding matters
    temperature = 0.7
    for prompt, (greedy,), (sampled,) in zip(
        messages,
        generate(model, tokenizer, messages, 1, 0.0, 1.0, 8, seed=0),
        generate(model, tokenizer, messages, 1, temperature, 0.9, 8, seed=0),
        strict=True,
    ):
        ids = torch.tensor([encode_prompt(tokenizer, prompt)])
        expected = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False)
        assert expected[0, ids.shape[1] :].tolist()[: len(greedy.token_ids)] == greedy.token_ids
        full = torch.cat([ids, torch.tensor([sampled.token_ids])], dim=1)
        logits = model(full).logits[0, ids.shape[1] - 1 : -1] / temperature
        chosen = logits.log_softmax(-1).gather(1, torch.tensor(sampled.token_ids)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(sampled.logprobs), chosen, atol=1e-5, rtol=0)


def test_nucleus_keeps_the_smallest_set_that_reaches_top_p():
    weights = torch.tensor([[0.1, 0.5, 0.15, 0.25]], dtype=torch.float64)
    assert nucleus(weights, 0.7).tolist() == [[0.0, 0.5, 0.0, 0.25]]
    assert nucleus(weights, 0.75).tolist() == [[0.0, 0.5, 0.0, 0.25]]
    assert nucleus(weights, 0.76).tolist() == [[0.0, 0.5, 0.15, 0.25]]


def test_too_long_a_prompt_is_an_error_that_names_the_fix(policy):
    model, tokenizer = load_policy(policy)
    with pytest.raises(ValueError, match="lower max_new_tokens"):
        sample_responses(model, tokenizer, [[5] * 250], 1.0, 1.0, 10, seed=0)


# loss -------------------------------------------------------------------------------------------------------


def eq_17(log_ratio, advantages, lengths, delta, low, high, scored):
    """Slow float64 reference: Eq. 17 over the batch, one response after the other."""
    total, tokens = 0.0, 0
    for row, advantage, length, counts in zip(log_ratio, advantages, lengths, scored, strict=True):
        row = row[:length]
        if not counts or sum(abs(x) for x in row) / length > delta:
            continue
        tokens += length
        for x in row:
            rho = math.exp(x)
            total += min(rho * advantage, min(max(rho, 1 - low), 1 + high) * advantage)
    return -total / max(tokens, 1)


def test_loss_is_eq_17_against_the_rollout_policy(policy, tmp_path):
    trainer = trainer_for(policy, tmp_path, delta=0.25)
    inputs = one_batch(trainer)
    generator = torch.Generator().manual_seed(0)
    shape = inputs["completion_ids"].shape
    # drift away from the rollout policy by hand: rows differ in size, tokens in sign
    scale = torch.linspace(0.0, 0.8, shape[0])[:, None]
    inputs["sampling_per_token_logps"] += scale * torch.randn(shape, generator=generator)
    inputs["advantages"] = torch.linspace(-1.5, 2.0, shape[0])
    inputs["scored"][1] = False
    trainer.records = [{} for _ in range(shape[0])]
    loss = trainer._compute_loss(trainer.model, inputs)

    with torch.no_grad():
        full = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
        mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        logits = trainer.model(full, attention_mask=mask, position_ids=positions).logits
        logits = logits[:, -shape[1] - 1 : -1].double()
        logprob = logits.log_softmax(-1).gather(2, inputs["completion_ids"][..., None])[..., 0]
    log_ratio = (logprob - inputs["sampling_per_token_logps"].double()).tolist()
    lengths = inputs["completion_mask"].sum(1).tolist()
    expected = eq_17(
        log_ratio, inputs["advantages"].tolist(), lengths, 0.25, 0.2, 0.28, inputs["scored"].tolist()
    )
    assert loss.item() == pytest.approx(expected, abs=1e-5)
    unmasked = eq_17(log_ratio, inputs["advantages"].tolist(), lengths, 1e9, 0.2, 0.28, [True] * shape[0])
    assert abs(unmasked - expected) > 1e-2  # the case tells masking from none


def test_gradient_accumulation_changes_nothing(policy, tmp_path):
    """Two updates per rollout, so that MirrorPop masks some rows in the second; KL on."""
    settings = {
        "steps": 2,
        "checkpoint_every": 2,
        "updates_per_rollout": 2,
        "warmup_steps": 0,
        "kl_beta": 0.05,
    }
    settings |= {"learning_rate": 2e-2}
    # the drift at the second update does not depend on delta: its median masks half of the rows
    train(policy, tmp_path / "drift", delta=None, **settings)
    drifts = sorted(line["mean_abs_log_ratio"] for line in lines(tmp_path / "drift" / "rollouts.jsonl"))
    settings |= {"delta": drifts[len(drifts) // 2] + 1e-4}
    whole = train(policy, tmp_path / "whole", **settings)
    parts = train(policy, tmp_path / "parts", gradient_accumulation_steps=4, **settings)
    kept = lines(tmp_path / "whole" / "metrics.jsonl")[-1]["kept_token_share"]
    assert 0 < kept < 1
    start, one, four = (load_file(folder / "model.safetensors") for folder in (policy, whole, parts))
    moved = torch.cat([(one[name] - start[name]).flatten() for name in one]).norm()
    apart = torch.cat([(one[name] - four[name]).flatten() for name in one]).norm()
    assert apart <= 5e-3 * moved


def test_theta_and_rollout_logprobs_use_the_same_temperature(policy, tmp_path):
    train(policy, tmp_path, steps=1, checkpoint_every=1, temperature=0.6)
    assert lines(tmp_path / "metrics.jsonl")[0]["mean_abs_log_ratio"] < 1e-5


def test_reward_is_climbed(policy, tmp_path):
    class LikesLetters(HashJudge):  # stand-in: an answer passes when it begins with a letter
        def verdict(self, task, response):
            self.kinds = ("ok",) if response[:1].isalpha() else ("compile_error:cpp",)
            return super().verdict(task, response)

    settings = {"steps": 25, "checkpoint_every": 25, "learning_rate": 3e-2, "max_new_tokens": 2}
    train(policy, tmp_path, LikesLetters(), prompts_per_step=4, group_size=8, **settings)
    passes = [line["pass/first_turn"] for line in lines(tmp_path / "metrics.jsonl")]
    assert sum(passes[-5:]) / 5 > sum(passes[:5]) / 5 + 0.3


# multi-turn -------------------------------------------------------------------------------------------------


def test_only_first_turn_tokens_are_trained_and_prime_echo_is_paid(policy, tmp_path):
    trainer = trainer_for(policy, tmp_path, max_turns=3)
    inputs = one_batch(trainer)
    assert max(len(t.turns) for t in trainer.trajectories) > 1
    for row, trajectory in enumerate(trainer.trajectories):
        length = int(inputs["completion_mask"][row].sum())
        assert inputs["completion_ids"][row, :length].tolist() == trajectory.turns[0].sample.token_ids
        prompt = encode_prompt(trainer.processing_class, task_messages(trajectory.start.task))
        assert inputs["prompt_ids"][row, -len(prompt) :].tolist() == prompt
        passes = [turn.verdict.success for turn in trajectory.turns]
        assert not any(passes[:-1])  # stops at the first pass
        assert passes[-1] or len(passes) == 3
    rewards = [prime_echo([turn.score for turn in t.turns]) for t in trainer.trajectories]
    expected = group_advantages(torch.tensor(rewards, dtype=torch.float64).view(2, 4)).flatten().float()
    torch.testing.assert_close(inputs["advantages"], expected)


def test_rollouts_file_holds_every_turn(policy, tmp_path):
    train(policy, tmp_path, steps=2, checkpoint_every=2, max_turns=2)
    records = lines(tmp_path / "rollouts.jsonl")
    assert [(r["step"], r["group"], r["sample"]) for r in records] == [
        (step, group, sample) for step in range(2) for group in range(2) for sample in range(4)
    ]
    for record in records:
        assert record["reward"] == pytest.approx(prime_echo([turn["score"] for turn in record["turns"]]))
        assert record["mean_abs_log_ratio"] < 1e-4
        assert record["turns"][0]["category"] == "ok" or record["turns"][0]["feedback"].startswith("verdict")
    assert any(len(record["turns"]) == 2 for record in records)


def test_oldest_feedback_goes_first_and_the_task_never(policy):
    _, tokenizer = load_policy(policy)
    task = toy_tasks(1)[0]
    attempts = [("first\n", "feedback one\n"), ("second\n", "feedback two " * 6)]

    def size(messages):
        return len(encode_prompt(tokenizer, messages))

    both = repair_messages(task, *attempts[1], earlier=attempts[:1])
    last = repair_messages(task, *attempts[1])
    assert fit_repair(tokenizer, task, attempts, size(both)) == both
    assert fit_repair(tokenizer, task, attempts, size(both) - 1) == last
    cut = fit_repair(tokenizer, task, attempts, size(last) - 1)
    assert cut[0] == task_messages(task)[0] and "second" in cut[1]["content"]
    assert len(cut[2]["content"]) < len(last[2]["content"]) and size(cut) < size(last)
    assert fit_repair(tokenizer, task, attempts, size(task_messages(task))) is None


# infra, retries ---------------------------------------------------------------------------------------------


def test_machine_faults_never_reach_the_policy(policy, tmp_path):
    judge = HashJudge(kinds=("ok", "infra:worker", "compile_error:cpp"))
    trainer = trainer_for(policy, tmp_path, judge)
    inputs = one_batch(trainer)
    faulted = torch.tensor([t.turns[0].verdict.kind == "infra" for t in trainer.trajectories])
    assert faulted.any() and not faulted.all()
    assert inputs["scored"].tolist() == (~faulted).tolist()
    assert (inputs["advantages"][faulted] == 0).all()
    for group in range(2):
        rows = slice(group * 4, group * 4 + 4)
        known = [t.turns[0].score for t in trainer.trajectories[rows] if t.is_scored]
        if len(known) > 1:
            expected = group_advantages(known).float()
            torch.testing.assert_close(inputs["advantages"][rows][~faulted[rows]], expected)
    # the loss does not move with what the faulted rows say
    before = trainer._compute_loss(trainer.model, inputs).item()
    inputs["advantages"][faulted] = 5.0
    inputs["sampling_per_token_logps"][faulted] -= 3.0
    assert trainer._compute_loss(trainer.model, inputs).item() == before


def test_failed_groups_come_back_as_single_turn_repair_tasks(policy, tmp_path):
    judge = HashJudge(kinds=("compile_error:cpp",))
    settings = {"steps": 3, "checkpoint_every": 3, "max_turns": 2, "p_buf": 1.0, "retry_start_step": 2}
    train(policy, tmp_path, judge, **settings)
    records = lines(tmp_path / "rollouts.jsonl")
    assert [r["is_retry"] for r in records] == [False] * 16 + [True] * 8
    assert all(len(r["turns"]) == (1 if r["is_retry"] else 2) for r in records)
    assert all(r["reward"] == -1.0 for r in records if r["is_retry"])
    state = json.loads((tmp_path / "checkpoint-3" / "retry_buffer.json").read_text())
    assert len(state["entries"]) == 6
    first = next(r for r in records if r["task"] == state["entries"][0]["task"])
    assert state["entries"][0]["candidate"] == first["turns"][0]["response"]
    assert state["entries"][0]["feedback"] == first["turns"][0]["feedback"]


def test_a_repair_row_is_prompted_with_candidate_and_feedback_and_fully_trained(policy, tmp_path):
    judge = HashJudge(kinds=("compile_error:cpp",))
    trainer = trainer_for(policy, tmp_path, judge, p_buf=1.0, max_turns=2)
    one_batch(trainer)
    inputs = one_batch(trainer)
    entry = trainer.trajectories[0].start
    assert entry.is_retry and entry.max_turns == 1
    candidates = {(e.task, e.candidate, e.feedback) for e in trainer.retry.entries}
    task = entry.task
    assert any(entry.messages == repair_messages(task, c, f) for t, c, f in candidates if t == task.id)
    assert (
        len({str(t.start.messages) for t in trainer.trajectories[:4]}) == 1
    )  # a whole group repairs one answer
    lengths = [len(t.turns[0].sample.token_ids) for t in trainer.trajectories]
    assert inputs["completion_mask"].sum(1).tolist() == lengths


# resuming ---------------------------------------------------------------------------------------------------


def test_killed_and_resumed_equals_undisturbed_even_past_a_broken_checkpoint(policy, tmp_path):
    settings = {"steps": 6, "checkpoint_every": 2, "max_turns": 2, "p_buf": 0.5, "kl_beta": 0.01}
    settings |= {"retry_trigger": "no_positive"}
    judge = HashJudge(kinds=("ok", "compile_error:cpp", "compile_error:cpp", "runtime_error:crash"))
    straight = train(policy, tmp_path / "straight", judge, **settings)
    records = lines(tmp_path / "straight" / "rollouts.jsonl")
    assert any(r["is_retry"] for r in records if r["step"] >= 4)

    killed = HashJudge(judge.kinds, stop_at_call=judge.calls)
    with pytest.raises(KeyboardInterrupt):
        train(policy, tmp_path / "killed", killed, **settings)
    assert lines(tmp_path / "killed" / "rollouts.jsonl")[-1]["step"] == 4
    weights = tmp_path / "killed" / "checkpoint-4" / "model.safetensors"
    damaged = bytearray(weights.read_bytes())
    damaged[-1] ^= 1
    weights.write_bytes(damaged)
    with pytest.warns(UserWarning, match="checkpoint-4 is not usable"):
        resumed = train(policy, tmp_path / "killed", HashJudge(judge.kinds), **settings)

    assert lines(tmp_path / "killed" / "rollouts.jsonl") == records
    one, other = load_file(straight / "model.safetensors"), load_file(resumed / "model.safetensors")
    assert all(torch.equal(one[name], other[name]) for name in one)

    def without_times(path):
        times = ("step_time", "rollout_s", "cpu_s")
        return [{k: v for k, v in line.items() if k not in times} for line in lines(path)]

    assert without_times(tmp_path / "killed" / "metrics.jsonl") == without_times(
        tmp_path / "straight" / "metrics.jsonl"
    )


def test_a_finished_stage_is_kept_and_other_settings_are_refused(policy, tmp_path):
    judge = HashJudge()
    first = train(policy, tmp_path, judge, steps=1, checkpoint_every=1)
    calls = judge.calls
    assert train(policy, tmp_path, judge, steps=1, checkpoint_every=1) == first
    assert judge.calls == calls
    with pytest.raises(ValueError, match="seed: 0 -> 1"):
        train(policy, tmp_path, steps=1, checkpoint_every=1, seed=1)


def test_unusable_settings_say_what_to_change(policy, tmp_path):
    with pytest.raises(ValueError, match="group_size must be >= 2"):
        GRPOStageConfig(group_size=1)
    with pytest.raises(ValueError, match="multiple of updates_per_rollout"):
        GRPOStageConfig(steps=5, updates_per_rollout=2)
    with pytest.raises(ValueError, match="raise max_prompt_tokens"):
        trainer_for(policy, tmp_path, max_prompt_tokens=3)
