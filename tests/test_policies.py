"""Tokenizer, tiny policy, prompts and the supervised stage."""

import json
import random
import shutil

import pytest
import torch

from musalib.synthesis.teacher import write_candidate, write_unreliable
from musalib.synthesis.workloads import sample_programs, task_of
from musalib.training.policies import (
    PolicyError,
    TinyPolicyConfig,
    build_policy,
    build_tokenizer,
    find_blocks,
    load_policy,
    save_policy,
)
from musalib.training.prompts import repair_messages, task_messages
from musalib.training.sft import SFTStageConfig, encode, lay_out, target_of, train_sft

PROGRAMS = sample_programs("train", 600, seed=0)
TINY = TinyPolicyConfig(hidden=32, layers=1, heads=2, ffn=64, vocab=1024, max_length=256)


def records_of(write=write_unreliable):
    rng = random.Random(0)
    return [
        {
            "prompt": task_messages(task_of(program)),
            "completion": [{"role": "assistant", "content": write(program, rng)}],
        }
        for program in PROGRAMS
    ]


@pytest.fixture(scope="module")
def records():
    return records_of()


@pytest.fixture(scope="module")
def tokenizer(records):
    return build_tokenizer([m["content"] for r in records for m in r["prompt"] + r["completion"]], TINY.vocab)


@pytest.fixture(scope="module")
def policy_dir(tokenizer, tmp_path_factory):
    return save_policy(build_policy(tokenizer, TINY, seed=0), tokenizer, tmp_path_factory.mktemp("policy"))


# --- tokenizer and prompts


@pytest.mark.parametrize(
    "text",
    [
        "",
        "x",
        "\n\n",
        "für ∑ \t  x\r\n  <b>\n",
        "max abs error 1.25e-02 at [3, 17]\n",
        "    v = never_seen(v);\n\x00",
    ],
)
def test_any_text_round_trips(tokenizer, text):
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_corpus_texts_round_trip_and_are_short(tokenizer, records):
    lengths = []
    for record in records:
        prompt = tokenizer.apply_chat_template(
            record["prompt"], add_generation_prompt=True, return_dict=False
        )
        answer = record["completion"][0]["content"]
        ids = tokenizer(answer)["input_ids"]
        assert tokenizer.decode(ids) == answer
        lengths.append((len(prompt), len(ids)))
    assert max(prompt for prompt, _ in lengths) <= 35
    assert sorted(answer for _, answer in lengths)[int(0.95 * len(lengths))] <= 45
    assert tokenizer.pad_token_id != tokenizer.eos_token_id


def test_statements_are_single_tokens(tokenizer):
    for line in ("        v = v + 0.5f;\n", "        x = torch.tanh(x)\n"):
        assert len(tokenizer(line)["input_ids"]) == 1


def test_blocks_join_what_always_occurs_together():
    texts = [f"import a\nimport b\nx = {i}\nx = {j}\nend\n" for i in range(9) for j in range(9)]
    assert find_blocks(texts) == ["import a\nimport b\n"]


def test_tokenizer_is_deterministic_and_survives_saving(tokenizer, records, policy_dir):
    again = build_tokenizer(
        [m["content"] for r in records for m in r["prompt"] + r["completion"]], TINY.vocab
    )
    assert again.get_vocab() == tokenizer.get_vocab()
    _, loaded = load_policy(policy_dir)
    text = records[5]["completion"][0]["content"]
    assert loaded(text)["input_ids"] == tokenizer(text)["input_ids"]


def test_generation_mask_covers_answers_with_their_end_token(tokenizer, records):
    messages = records[0]["prompt"] + records[0]["completion"]
    out = tokenizer.apply_chat_template(messages, return_assistant_tokens_mask=True, return_dict=True)
    trained = [i for i, flag in zip(out["input_ids"], out["assistant_masks"], strict=True) if flag]
    assert tokenizer.decode(trained) == messages[-1]["content"] + tokenizer.eos_token


def test_repair_prompt_is_task_answer_feedback():
    task = task_of(PROGRAMS[0])
    messages = repair_messages(task, "<think>hm</think>\ncode 2", "it failed", earlier=[("code 1", "no")])
    assert [m["role"] for m in messages] == ["user", "assistant", "user", "assistant", "user"]
    assert messages[0] == task_messages(task)[0]
    assert messages[3]["content"] == "code 2" and messages[4]["content"].startswith("it failed\n")
    with pytest.raises(ValueError, match="backend must be one of cpu, cuda, musa"):
        task_messages(task, "rocm")


# --- policy folders


def test_policy_is_seeded(tokenizer):
    first, second = (build_policy(tokenizer, TINY, seed=3) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    assert first.config.vocab_size == len(tokenizer)


def test_damaged_or_missing_policies_are_explained(policy_dir, tmp_path):
    broken = shutil.copytree(policy_dir, tmp_path / "broken")
    (broken / "model.safetensors").write_bytes((policy_dir / "model.safetensors").read_bytes()[:1000])
    with pytest.raises(PolicyError, match=r"broken.*rerun the stage"):
        load_policy(broken)
    (tmp_path / "empty").mkdir()
    with pytest.raises(PolicyError, match=r"holds no config\.json"):
        load_policy(tmp_path / "empty")


# --- supervised stage


def test_loss_is_on_the_answer_only(tokenizer, records):
    row = encode(tokenizer, records[0]["prompt"], records[0]["completion"][0]["content"], 256)
    trained = [label for label in row["labels"] if label != -100]
    assert tokenizer.decode(trained) == records[0]["completion"][0]["content"] + tokenizer.eos_token


def test_pool_target_changes_with_the_epoch_and_repeats_with_the_seed(tokenizer):
    record = {"prompt": task_messages(task_of(PROGRAMS[0])), "pool": list("abcdefgh")}
    drawn = [target_of(record, seed=0, epoch=epoch) for epoch in range(40)]
    assert set(drawn) == set("abcdefgh")
    assert drawn == [target_of(record, seed=0, epoch=epoch) for epoch in range(40)]
    assert drawn != [target_of(record, seed=1, epoch=epoch) for epoch in range(40)]


def test_layout_covers_every_record_once_an_epoch(tokenizer, records):
    config = SFTStageConfig(steps=75, batch_size=16)
    rows = lay_out(tokenizer, records, config)
    assert len(rows) == 1200 == 2 * len(records)
    assert rows == lay_out(tokenizer, records, config)
    counts = {}
    for row in rows:
        counts[tuple(row["input_ids"])] = counts.get(tuple(row["input_ids"]), 0) + 1
    assert set(counts.values()) <= {2, 4}  # 4: two records that happen to be the same text


def test_too_long_samples_are_named_not_cut(tokenizer, records):
    with pytest.raises(ValueError, match="none of 600 records fits into max_length=4"):
        lay_out(tokenizer, records, SFTStageConfig(steps=2, max_length=4))


def metrics(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def weights(folder):
    return load_policy(folder)[0].state_dict()


def test_stage_learns_resumes_exactly_and_survives_a_damaged_checkpoint(policy_dir, records, tmp_path):
    config = SFTStageConfig(
        steps=12, batch_size=8, learning_rate=2e-2, warmup_steps=2, save_every=4, log_every=2
    )
    whole = train_sft(policy_dir, records, tmp_path / "whole", config)
    loss = [row["loss"] for row in metrics(tmp_path / "whole")]
    assert len(loss) == 6 and loss[-1] < 0.8 * loss[0]
    # the same run, killed after step 12 was written badly: 8 is used, the end is the same
    shutil.copytree(tmp_path / "whole", tmp_path / "killed", ignore=shutil.ignore_patterns("policy"))
    (tmp_path / "killed" / "checkpoint-12" / "model.safetensors").write_bytes(b"torn")
    with pytest.warns(UserWarning, match="checkpoint-12"):
        again = train_sft(policy_dir, records, tmp_path / "killed", config)
    assert all(torch.equal(value, weights(again)[name]) for name, value in weights(whole).items())
    assert metrics(tmp_path / "killed") == metrics(tmp_path / "whole")
    # a finished stage returns at once; other settings are refused
    assert train_sft(policy_dir, records, tmp_path / "whole", config) == whole
    with pytest.raises(ValueError, match="learning_rate"):
        train_sft(
            policy_dir, records, tmp_path / "whole", SFTStageConfig(steps=12, batch_size=8, save_every=4)
        )


def test_pool_records_train(policy_dir, tmp_path):
    rng = random.Random(1)
    pools = [
        {"prompt": task_messages(task_of(p)), "pool": [write_candidate(p, rng) for _ in range(4)]}
        for p in PROGRAMS[:16]
    ]
    folder = train_sft(
        policy_dir, pools, tmp_path / "rft", SFTStageConfig(steps=2, batch_size=8, save_every=2)
    )
    assert (folder / "model.safetensors").is_file() and (folder / "tokenizer.json").is_file()
