"""Tasks, splits and the template teacher: what the corpora are made of."""

import ast
import json
import random

import pytest

from musalib.mooreeval import EvalConfig, MooreEval
from musalib.synthesis import corpora
from musalib.synthesis.operators import OPERATORS, wrong_share_table
from musalib.synthesis.teacher import (
    STRUCTURES,
    Draft,
    draft,
    render,
    revise,
    write_candidate,
    write_unreliable,
)
from musalib.synthesis.workloads import (
    SPLITS,
    Program,
    check_disjoint,
    program_of,
    sample_programs,
    split_of,
    task_of,
    well_posed,
)
from musalib.tasks import Task
from musalib.verdict import Verdict

SOFTMAX = Program("xy", ("relu", "add_y"), "softmax")


def test_task_is_a_kernelbench_module_with_its_program_in_meta():
    task = task_of(SOFTMAX)
    forward = [line.strip() for line in task.source.splitlines() if line.strip().startswith("x = ")]
    assert forward == ["x = torch.relu(x)", "x = x + y", "x = torch.softmax(x, dim=-1)"]
    assert task.meta["depth"] == 3 and task.meta["family"] == "normalisation"
    assert program_of(Task.from_dict(json.loads(json.dumps(task.to_dict())))) == SOFTMAX


def test_reference_runs_and_has_the_declared_shape():
    scope: dict = {}
    exec(task_of(Program("matmul", ("tanh",), "sum")).source, scope)
    x, w = scope["get_inputs"]()
    assert scope["Model"](*scope["get_init_inputs"]())(x, w).shape == (x.shape[0],)


def test_programs_are_checked():
    with pytest.raises(ValueError, match="unknown operator 'rleu'"):
        Program("x", ("rleu",))
    with pytest.raises(ValueError, match="need head 'xy'"):
        Program("x", ("add_y",))


def test_ill_posed_programs_are_seen():
    assert not well_posed(Program("x", ("abs", "relu")))  # relu changes nothing, a wrong line could pass
    assert not well_posed(Program("x", ("add_half",), "softmax"))  # softmax is shift invariant
    assert not well_posed(Program("x", ("exp", "exp", "exp")))  # overflows
    assert well_posed(SOFTMAX)


def test_splits_are_disjoint_deterministic_and_cover_every_family():
    sets = {split: sample_programs(split, 100, seed=3) for split in SPLITS}
    check_disjoint(sets)
    assert sets["final"] == sample_programs("final", 100, seed=3) != sample_programs("final", 100, seed=4)
    for split, programs in sets.items():
        assert len(set(programs)) == 100
        assert {split_of(program) for program in programs} == {split}
        assert {program.family for program in programs} == {
            "elementwise",
            "reduction",
            "normalisation",
            "matmul",
        }
        assert {program.depth for program in programs} == {1, 2, 3, 4}


def test_disjointness_check_names_the_leak():
    with pytest.raises(ValueError, match=r"xy\.relu\.add_y\.softmax is in both 'train' and 'final'"):
        check_disjoint({"train": [SOFTMAX], "final": [SOFTMAX]})


def test_asking_for_more_programs_than_exist_says_how_many_there_are():
    with pytest.raises(ValueError, match=r"holds only [0-9]+ programs of depths"):
        sample_programs("tune", 40, seed=0, depths=(1,))


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("program", [SOFTMAX, Program("matmul", ("gelu",)), Program("x", (), "amax")])
def test_candidates_are_complete_modules(program, structure):
    text = write_candidate(program, random.Random(0), structure)
    classes = [node.name for node in ast.parse(text).body if isinstance(node, ast.ClassDef)]
    assert classes == ["ModelNew"]
    assert 'functions=["musa_fused_rows"]' in text and "#include" not in text
    host = (
        f"torch::Tensor musa_fused_rows({', '.join(f'torch::Tensor {name}' for name in program.arguments)})"
    )
    assert text.count(host) == 1
    assert ("musa_chain_kernel(" in text) == (structure == "kernel")


def test_structures_differ_and_unknown_ones_are_refused():
    texts = {write_candidate(SOFTMAX, random.Random(0), structure) for structure in STRUCTURES}
    assert len(texts) == len(STRUCTURES)
    with pytest.raises(ValueError, match="structure must be one of flat"):
        write_candidate(SOFTMAX, random.Random(0), "blocked")


def test_wrong_share_of_drafts_follows_the_table():
    rng = random.Random(0)
    for name in ("relu", "sigmoid", "mish"):
        wrong = (
            sum(not draft(Program("x", (name,)), rng, unreliable=True).right[0] for _ in range(3000)) / 3000
        )
        assert abs(wrong - OPERATORS[name].wrong_share) < 0.03
    assert all(all(draft(SOFTMAX, rng, unreliable=False).right) for _ in range(50))


def test_rare_operators_are_right_in_two_to_five_per_cent():
    rare = [operator for operator in OPERATORS.values() if operator.rare]
    assert rare and all(0.02 <= 1 - operator.wrong_share <= 0.05 for operator in rare)


def test_second_answers_keep_right_lines_and_are_better():
    rng = random.Random(0)
    program = Program("x", ("sigmoid", "gelu", "sin"))
    before = after = 0
    for _ in range(400):
        first = draft(program, rng, unreliable=True)
        second = revise(program, first, rng)
        for i, right in enumerate(first.right):
            assert not right or second.texts[i] == first.texts[i]
        before, after = before + sum(first.right), after + sum(second.right)
        assert render(program, second).count("ModelNew") == 1
    assert before < after < 3 * 400  # better, still not reliable


def test_same_generator_state_gives_the_same_text():
    assert write_unreliable(SOFTMAX, random.Random(7)) == write_unreliable(SOFTMAX, random.Random(7))


def test_share_table_lists_every_operator():
    table = wrong_share_table()
    assert len(table.splitlines()) == 2 + len(OPERATORS)
    assert "| mish (rare) | `F.mish(x)` | 1 | 3 | 96 % |" in table


class TextJudge:
    """Stand-in verifier for the file logic only: refuses a text that calls a function which does not exist."""

    def __init__(self):
        self.calls = 0

    def verify_many(self, jobs):
        for _, text in jobs:
            self.calls += 1
            yield (
                Verdict("compile_error:cpp", detail="not declared") if invents(text) else Verdict("ok", q=1.0)
            )


def invents(text):
    return any(
        name in text for name in ("= relu(v)", "sigmoid(v)", "= gelu(v)", "absolute(v)", "tanh_approx(v)")
    )


def test_build_data_is_resumable_and_reproducible(tmp_path):
    config = corpora.DataConfig(
        base_answers=80, base_dialogues=40, base_checked=10, sft_programs=10, sft_answers=20, rl_tasks=20,
        tune_tasks=12, final_tasks=12,
    )  # fmt: skip
    judge = TextJudge()
    report = corpora.build_data(tmp_path / "a", config, judge)
    assert report["tasks"]["final"]["count"] == 12 and report["tasks"]["sft"]["with_rare_operator"] == 0
    assert 0 < report["base_corpus"]["repair_dialogues"] < 40
    calls = judge.calls
    assert corpora.build_data(tmp_path / "a", config, judge) == report and judge.calls == calls
    corpora.build_data(tmp_path / "b", config, TextJudge())
    names = sorted(path.name for path in (tmp_path / "a").iterdir())
    assert {"tasks_sft.jsonl", "tasks_rl.jsonl", "base_corpus.jsonl", "sft_corpus.jsonl"} <= set(names)
    for name in names:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    with pytest.raises(ValueError, match="rl_tasks"):
        corpora.build_data(tmp_path / "a", corpora.DataConfig(rl_tasks=21), judge)


def test_dialogues_hold_the_verifiers_own_words(tmp_path):
    rng = random.Random(0)
    programs = sample_programs("train", 30, 0)
    firsts = [(program, draft(program, rng, unreliable=True)) for program in programs]
    records = corpora.repair_dialogues(firsts, rng, 0.5, TextJudge(), "cpu")
    assert records
    for record in records:
        roles = [message["role"] for message in record["prompt"]]
        assert roles == ["user", "assistant", "user"]
        assert invents(record["prompt"][1]["content"]) and "not declared" in record["prompt"][2]["content"]


@pytest.mark.slow
def test_verifier_accepts_the_teacher_and_refuses_each_wrong_line():
    """The real verifier on every operator once: one right and one wrong text, each alone in its program."""
    programs = {
        "unary": lambda name: Program("x", (name,)),
        "binary": lambda name: Program("xy", (name,)),
        "tail": lambda name: Program("x", (), name),
        "matmul": lambda name: Program("matmul", ()),
    }
    rng = random.Random(0)
    jobs, expected = [], []
    for name, operator in OPERATORS.items():
        program = programs[operator.kind](name)
        for text, right in ((rng.choice(operator.right), True), (rng.choice(operator.wrong), False)):
            jobs.append((task_of(program), render(program, Draft(rng.choice(STRUCTURES), (text,), (right,)))))
            expected.append(right)
    with MooreEval("cpu", EvalConfig(trials=2, timing=False, seed=0)) as evaluator:
        verdicts = list(evaluator.verify_many(jobs))
    for (task, _), verdict, right in zip(jobs, verdicts, expected, strict=True):
        assert verdict.success == right, f"{task.id}: {verdict.category} {verdict.detail}"
        assert right or verdict.kind in ("compile_error", "correctness_error")
