"""The command line: exit codes, one JSON object on stdout, and a batch that survives being killed."""

import json
import os
import subprocess
import sys
import time
import types
from dataclasses import dataclass
from typing import ClassVar

import pytest

from musalib import cli
from musalib.cli import main
from musalib.verdict import Verdict

TASK = """import torch
import torch.nn as nn

class Model(nn.Module):
    def forward(self, x):
        return torch.relu(x)

def get_inputs():
    return [torch.rand(16, 64)]

def get_init_inputs():
    return []
"""


@dataclass
class FakeConfig:
    """Stands in for EvalConfig in tests of the shell around the verifier."""

    trials: int = 5
    timeout_s: float = 10.0
    build_timeout_s: float = 120.0
    timing: bool = True
    workers: int | None = None
    store: object = None


class FakeMooreEval:
    """Judges nothing: the response says which category to return. The real verifier has its own tests."""

    judged: ClassVar[list] = []

    def __init__(self, backend, config):
        self.config = config

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def verify(self, task, response):
        print("noise from a library")
        self.judged.append(response)
        text = response.decode("utf-8", "surrogateescape") if isinstance(response, bytes) else response
        if text == "crash":
            raise KeyboardInterrupt
        return Verdict(
            category=text.strip() or "ok",
            task=task.id,
            q=1.0,
            detail="caf\udce9" if "detail" in text else None,
        )

    def verify_stream(self, jobs):
        for index, (task, response) in enumerate(jobs):
            yield index, self.verify(task, response)


@pytest.fixture
def fake(monkeypatch):
    module = types.ModuleType("musalib.mooreeval")
    module.MooreEval, module.EvalConfig = FakeMooreEval, FakeConfig
    monkeypatch.setitem(sys.modules, "musalib.mooreeval", module)
    monkeypatch.setattr("musalib.batch.default_store", lambda: None)
    monkeypatch.setattr(FakeMooreEval, "judged", [])
    return FakeMooreEval


@pytest.fixture
def files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "task.py").write_text(TASK)
    (tmp_path / "no_model.py").write_text("x = 1\n")
    return tmp_path


def test_help_is_instant_and_loads_no_framework():
    code = "import sys; from musalib import cli; cli.parser().format_help(); print(sorted({'torch', 'rich', 'pandas'} & sys.modules.keys()))"
    before = os.times()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    after = os.times()
    assert done.stdout == "[]\n"
    assert after.children_user + after.children_system - before.children_user - before.children_system < 0.5
    shown = subprocess.run([sys.executable, "-m", "musalib", "--help"], capture_output=True, text=True)
    assert shown.returncode == 0 and "verify-batch" in shown.stdout


@pytest.mark.parametrize(
    ("category", "code"),
    [
        ("ok", 0),
        ("compile_error:cpp", 0),
        ("cheating:aten", 0),
        ("runtime_error:detail", 0),
        ("infra:disk", 3),
    ],
)
def test_exit_code_says_whether_a_verdict_was_reached(fake, files, capfd, category, code):
    (files / "candidate.txt").write_text(category)
    assert main(["verify", "task.py", "candidate.txt"]) == code
    assert capfd.readouterr().out.startswith(category)


def test_json_is_the_only_thing_on_stdout(fake, files, capfd):
    (files / "candidate.txt").write_bytes(b"ok")
    assert main(["verify", "task.py", "candidate.txt", "--json", "--trials", "2"]) == 0
    captured = capfd.readouterr()
    assert captured.out.count("\n") == 1 and Verdict.from_dict(json.loads(captured.out)).success
    assert "noise from a library" in captured.err


def test_a_candidate_that_is_not_utf8_reaches_the_verifier(fake, files, capfd):
    (files / "candidate.txt").write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match="unknown verdict category"):  # the fake read it as a category
        main(["verify", "task.py", "candidate.txt"])
    assert fake.judged == [b"\xff\xfe"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["verify", "absent.py", "candidate.txt"], "cannot read task file absent.py"),
        (["verify", "no_model.py", "candidate.txt"], "must define `class Model(nn.Module)`"),
        (["verify", "task.py", "absent.txt"], "cannot read candidate absent.txt"),
        (["verify", "task.py", "."], "cannot read candidate ."),
        (["verify-batch", "absent.jsonl", "--out", "v.jsonl"], "cannot read jobs from absent.jsonl"),
        (["verify-batch", "jobs.jsonl", "--out", "v.jsonl", "--ray", "auto"], "not available here yet"),
        (["run", "--profile", "tinny"], "did you mean 'tiny'"),
        (["run", "-p", "seed"], "expected key=value"),
        (["figures", "--run", "absent-run"], "absent-run"),
        (["evaluate", "--policy", ".", "--suite", "absent.jsonl"], "absent.jsonl"),
    ],
)
def test_wrong_use_is_code_2_and_one_clear_line(fake, files, capfd, arguments, message):
    (files / "candidate.txt").write_text("ok")
    assert main(arguments) == 2
    captured = capfd.readouterr()
    assert message in captured.err and "Traceback" not in captured.err and not captured.out


@pytest.mark.parametrize(
    "arguments", [["verify", "a"], ["verify", "a", "b", "--trials", "0"], ["nonsense"], []]
)
def test_argparse_errors_are_code_2(arguments):
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2


def write_jobs(folder, *jobs):
    (folder / "jobs.jsonl").write_text("".join(json.dumps(job) + "\n" for job in jobs))


def job(name, candidate="ok", task="task.py"):
    return {"id": name, "task": task, "candidate": candidate}


def read(folder):
    return [json.loads(line) for line in (folder / "verdicts.jsonl").read_text().splitlines()]


BATCH = ["verify-batch", "jobs.jsonl", "--out", "verdicts.jsonl"]


def test_batch_takes_paths_and_text(fake, files, capfd):
    (files / "answer.txt").write_bytes(b"compile_error:cpp")
    write_jobs(files, job("a", "answer.txt"), job("b", "ok\n", task=TASK), job(3))
    assert main(BATCH) == 0
    assert [(v["id"], v["category"]) for v in read(files)] == [
        ("a", "compile_error:cpp"),
        ("b", "ok"),
        ("3", "ok"),
    ]
    captured = capfd.readouterr()
    assert not captured.out and "3/3 judged" in captured.err and "2 ok" in captured.err


def test_batch_continues_after_a_kill_with_a_torn_line(fake, files, capfd):
    write_jobs(files, job("a"), job("b", "crash"), job("c"))
    assert main(BATCH) == 130
    assert [v["id"] for v in read(files)] == ["a"]
    with (files / "verdicts.jsonl").open("a") as stream:
        stream.write('{"id": "b", "categ')
    assert main(BATCH) == 2
    assert "add --resume" in capfd.readouterr().err
    write_jobs(files, job("a"), job("b"), job("c"))
    fake.judged.clear()
    assert main([*BATCH, "--resume"]) == 0
    assert [v["id"] for v in read(files)] == ["a", "b", "c"] and len(fake.judged) == 2
    assert main([*BATCH, "--resume"]) == 0
    assert len(read(files)) == 3 and len(fake.judged) == 2


def test_batch_judges_infra_again_and_says_so_in_its_exit_code(fake, files):
    write_jobs(files, job("a"), job("b", "infra:disk"))
    assert main(BATCH) == 3
    write_jobs(files, job("a"), job("b"))
    assert main([*BATCH, "--resume"]) == 0
    assert [(v["id"], v["category"]) for v in read(files)] == [("a", "ok"), ("b", "ok")]


@pytest.mark.parametrize(
    ("jobs", "message"),
    [
        ([job("a"), job("a")], "line 2: id 'a' occurs twice"),
        ([job("a"), {"id": "b", "task": "task.py"}], "line 2: a job is"),
        ([{"task": "task.py", "candidate": "ok"}], "line 1: a job needs an id"),
        ([job("a", "absent.txt")], "line 1: there is no candidate file absent.txt"),
        ([job("a", task="absent.py")], "line 1: there is no task file absent.py"),
        ([job("a", task="no_model.py")], "line 1: no_model: a task must define"),
        ([job("a", task="class Model:\n  pass\n")], "line 1: inline: a task must define"),
    ],
)
def test_batch_names_every_unusable_line_before_it_judges(fake, files, capfd, jobs, message):
    write_jobs(files, *jobs)
    assert main(BATCH) == 2
    assert message in capfd.readouterr().err
    assert not (files / "verdicts.jsonl").exists() and not fake.judged


def test_a_summary_reads_as_percent_with_intervals():
    half = {"mean": 0.5, "low": 0.25, "high": 0.75}
    lines = cli.summary_lines({"tasks": 4, "greedy": half, "by_depth": {"2": {"greedy": half}}})
    assert lines == [
        "tasks        4",
        "greedy       50.0% [25.0%, 75.0%]",
        "depth 2",
        "  greedy       50.0% [25.0%, 75.0%]",
    ]


def test_doctor_names_the_missing_compiler_and_its_fix(monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(["doctor"]) == 1
    out = capsys.readouterr().out
    assert "g++ was not found" in out and "apt install g++" in out


@pytest.mark.slow
def test_the_real_verifier_behind_the_command(files):
    from musalib import examples

    (files / "task.py").write_text(examples.TASK.source)
    for name, category in [
        ("native loop", "ok"),
        ("calls PyTorch in forward", "cheating"),
        ("missing semicolon", "compile_error"),
    ]:
        (files / "answer.txt").write_text(examples.CANDIDATES[name])
        command = [
            sys.executable,
            "-m",
            "musalib",
            "verify",
            "task.py",
            "answer.txt",
            "--json",
            "--trials",
            "2",
            "--no-timing",
        ]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert Verdict.from_dict(json.loads(done.stdout)).kind == category
    (files / "task.py").write_text(examples.TASK.source.replace("torch.relu(x)", "torch.no_such_operator(x)"))
    assert subprocess.run(command, capture_output=True).returncode == 2  # the task itself is broken


@pytest.mark.slow
def test_a_real_batch_killed_at_work_is_completed_by_resume(files):
    import random

    from musalib.synthesis.teacher import write_unreliable
    from musalib.synthesis.workloads import sample_programs, task_of

    rng = random.Random(0)
    programs = sample_programs("train", 40, 1)
    jobs = [job(i, write_unreliable(p, rng), task_of(p).source) for i, p in enumerate(programs)]
    write_jobs(files, *jobs)
    command = [
        sys.executable,
        "-m",
        "musalib",
        *BATCH,
        "--resume",
        "--no-cache",
        "--no-timing",
        "--trials",
        "2",
    ]
    first = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    out = files / "verdicts.jsonl"
    while first.poll() is None and (not out.exists() or out.read_bytes().count(b"\n") < 5):
        time.sleep(0.02)
    first.kill()
    first.wait()
    before = out.read_bytes().count(b"\n")
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0 and not done.stdout, done.stderr
    assert sorted(int(v["id"]) for v in read(files)) == list(range(40))
    assert f"{before} were there before" in done.stderr
