"""Task and Verdict: records that survive JSON and refuse what they cannot mean."""

import dataclasses
import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from musalib.tasks import Task, TaskError, iter_ids, load_tasks
from musalib.verdict import CATEGORIES, Verdict

SOURCE = """
import torch
import torch.nn as nn

class Model(nn.Module):
    def forward(self, x):
        return torch.relu(x)

def get_inputs():
    return [torch.randn(2, 3)]

def get_init_inputs():
    return []
"""


def test_task_survives_json():
    task = Task("relu", SOURCE, level=2, suite="synth", tolerance=1e-3, meta={"ops": ["relu"], "depth": 1})
    assert Task.from_dict(json.loads(json.dumps(task.to_dict()))) == task
    assert Task.from_dict({"id": "relu", "source": SOURCE, "new_field": 1}) == Task("relu", SOURCE)


def test_task_is_read_never_run(tmp_path):
    Task("t", SOURCE + "\nraise SystemExit('executed')\n")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("class Model(", "class Net("), "class Model.*it defines Net"),
        (("def get_inputs", "def inputs"), "get_inputs"),
        (("def get_init_inputs", "def init"), "get_init_inputs"),
        (("return []", "return ["), "not valid Python"),
        (("return []", "return '\0'"), "not valid Python"),
    ],
)
def test_task_names_what_is_missing(change, message):
    with pytest.raises(TaskError, match=f"mine: .*{message}"):
        Task("mine", SOURCE.replace(*change))


@pytest.mark.parametrize("tolerance", [-1e-3, math.nan])
def test_task_tolerance_is_checked(tolerance):
    with pytest.raises(TaskError, match="tolerance"):
        Task("t", SOURCE, tolerance=tolerance)


def test_task_files(tmp_path):
    (tmp_path / "relu.py").write_text(SOURCE)
    assert [task.id for task in load_tasks(tmp_path / "relu.py")] == ["relu"]
    assert Task.from_file(tmp_path / "relu.py", id="mine", level=3).level == 3
    records = [json.dumps({"id": name, "source": SOURCE}) for name in "ab"]
    (tmp_path / "tasks.jsonl").write_text("\n\n".join(records) + "\n")
    assert list(iter_ids(load_tasks(tmp_path / "tasks.jsonl"))) == ["a", "b"]


@pytest.mark.parametrize("line", ['{"id": "b"}', "{not json", '{"id": "b", "source": "x = 1"}'])
def test_a_bad_line_is_named(tmp_path, line):
    path = tmp_path / "tasks.jsonl"
    path.write_text(json.dumps({"id": "a", "source": SOURCE}) + "\n" + line + "\n")
    with pytest.raises(TaskError, match="line 2"):
        load_tasks(path)


def test_unreadable_task_files(tmp_path):
    (tmp_path / "binary.py").write_bytes(b"\xff\xfe\x00")
    for name in ("missing.py", "missing.jsonl", "binary.py"):
        with pytest.raises(TaskError, match="cannot read"):
            load_tasks(tmp_path / name)


def test_doubled_ids_are_refused():
    with pytest.raises(TaskError, match="'a' occurs twice"):
        list(iter_ids([Task("a", SOURCE), Task("a", SOURCE)]))


def test_a_task_error_is_a_value_error():
    assert issubclass(TaskError, ValueError)


@given(
    st.sampled_from(sorted(CATEGORIES)),
    st.none() | st.booleans(),
    st.none() | st.floats(0, 1),
    st.none() | st.floats(0, 100),
    st.dictionaries(st.text(max_size=3), st.integers() | st.text(max_size=3), max_size=3),
)
def test_verdict_survives_json(kind, compiled, q, speedup, evidence):
    verdict = Verdict(f"{kind}:what", compiled=compiled, q=q, speedup=speedup, evidence=evidence)
    assert Verdict.from_dict(json.loads(json.dumps(verdict.to_dict()))) == verdict
    assert verdict.kind == kind


def test_verdict_fills_what_is_missing():
    verdict = Verdict.from_dict({"category": "ok", "evidence": None, "of_a_newer_version": 1})
    assert verdict == Verdict("ok")
    fields = [f.name for f in dataclasses.fields(Verdict) if f.name not in ("category", "evidence")]
    assert all(getattr(verdict, name) is None for name in fields)


def test_verdict_is_frozen_and_success_is_ok_only():
    verdict = Verdict("ok")
    with pytest.raises(dataclasses.FrozenInstanceError):
        verdict.category = "infra"
    assert verdict.success
    assert not any(Verdict(kind).success for kind in CATEGORIES if kind != "ok")


@pytest.mark.parametrize("record", [{}, {"category": None}, {"category": 3}, [], "ok", {"category": "fine"}])
def test_verdict_refuses_other_records(record):
    with pytest.raises(ValueError, match="category"):
        Verdict.from_dict(record)


@pytest.mark.parametrize("q", [-0.1, 1.1, 75, math.nan])
def test_verdict_refuses_impossible_pass_shares(q):
    with pytest.raises(ValueError, match="q is the share"):
        Verdict("ok", q=q)


@pytest.mark.parametrize(
    "record", [[1], {"id": None, "source": "x"}, {"id": "a", "source": 3}, {"source": "x"}]
)
def test_task_records_of_the_wrong_kind_are_task_errors(record):
    with pytest.raises(TaskError):
        Task.from_dict(record)


def test_verdicts_hash_and_refuse_wrong_types():
    assert len({Verdict("ok", evidence={"a": [1]}), Verdict("ok", evidence={"a": [1]})}) == 1
    for record in ({"category": "ok", "q": "1"}, {"category": "ok", "evidence": 5}):
        with pytest.raises(ValueError):
            Verdict.from_dict(record)
