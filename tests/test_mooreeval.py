"""MooreEval on real candidates: real g++, real processes. Each test has one property; kinds, not single strings."""

import os
import time
from pathlib import Path

import psutil
import pytest

from musalib.mooreeval import EvalConfig, MooreEval
from musalib.tasks import Task, TaskError

pytestmark = pytest.mark.slow

TASK = """
import torch
import torch.nn as nn
class Model(nn.Module):
    def __init__(self):
        super().__init__()
    def forward(self, x):
        return torch.relu(x) * 1.5
def get_inputs():
    return [torch.randn(8, 16)]
def get_init_inputs():
    return []
"""
CPP = """
torch::Tensor scaled_relu_rows(torch::Tensor x) {
  auto y = torch::empty(x.sizes(), x.options());
  const float* a = x.data_ptr<float>();
  float* b = y.data_ptr<float>();
  for (int64_t i = 0; i < x.numel(); ++i) b[i] = a[i] > 0.0f ? a[i] * 1.5f : 0.0f;
  return y;
}
"""


def candidate(
    cpp: str = CPP, forward: str = "return ext.scaled_relu_rows(x)", top: str = "", init: str = "pass"
) -> str:
    indented = "\n".join("        " + line for line in forward.splitlines())
    return (
        "import os, sys, time, subprocess\nimport torch\nimport torch.nn as nn\nfrom torch.utils.cpp_extension import load_inline\n"
        f'CPP = r"""{cpp}"""\next = load_inline(name="e", cpp_sources=CPP, functions=["scaled_relu_rows"])\n{top}\n'
        f"class ModelNew(nn.Module):\n    def __init__(self):\n        super().__init__()\n        {init}\n"
        f"    def forward(self, x):\n{indented}\n"
    )


@pytest.fixture(scope="module")
def evaluator():
    with MooreEval("cpu", EvalConfig(trials=3, timeout_s=4.0, timing=False)) as made:
        yield made


@pytest.fixture(scope="module")
def task():
    return Task("scaled-relu", TASK)


BODY = "for (int64_t i = 0; i < x.numel(); ++i) b[i] = a[i] > 0.0f ? a[i] * 1.5f : 0.0f;"
KINDS = {
    "honest": (candidate(), "ok"),
    "honest, static helper": (candidate("static float act(float v) { return v > 0.0f ? v * 1.5f : 0.0f; }\n" + CPP.replace("a[i] > 0.0f ? a[i] * 1.5f : 0.0f", "act(a[i])")), "ok"),
    "honest, real headers only": (candidate(CPP.replace("const float* a = x.data_ptr<float>();", "auto acc = x.accessor<float, 2>(); const float* a = acc.data();")), "ok"),
    "wrong value": (candidate(CPP.replace("1.5f", "1.4f")), "correctness_error:values"),
    "wrong shape": (candidate(forward="return ext.scaled_relu_rows(x)[:1]"), "correctness_error:shape"),
    "changes its input": (candidate(CPP.replace("float* b = y", "y = x; float* b = y")), "correctness_error:mutated_input"),
    "unwritten output": (candidate(CPP.replace(BODY, "(void)a; (void)b;")), "correctness_error:values"),
    "undeclared name": (candidate(CPP.replace("a[i] * 1.5f", "scale(a[i])")), "compile_error:cpp"),
    "undefined symbol": (candidate(CPP.replace("a[i] * 1.5f", "__expf(a[i])")), "compile_error:link"),
    "unbound function": (candidate().replace('functions=["scaled_relu_rows"]', 'functions=["other_name"]'), "compile_error:cpp"),
    "python syntax": ("class ModelNew(:\n    pass", "compile_error:python_syntax"),
    "prose": ("No code today.", "extract_error:no_code"),
    "import fails": (candidate(top="raise KeyError('x')"), "runtime_error:import_error"),
    "constructor fails": (candidate(init="raise ValueError('no')"), "runtime_error:exception"),
    "segmentation fault": (candidate(CPP.replace(BODY, "*(volatile int*)8 = 1;")), "runtime_error:crash"),
    "exit with success": (candidate(forward="os._exit(0)"), "runtime_error:exit"),
    "exception in C++": (candidate(CPP.replace(BODY, 'TORCH_CHECK(false, "tile size");')), "runtime_error:exception"),
    "endless loop": (candidate(CPP.replace(BODY, "for (volatile int i = 0;; ) { (void)i; }")), "runtime_error:timeout"),
    "too much memory": (candidate(CPP.replace("torch::empty(x.sizes(), x.options())", "torch::empty({int64_t(1) << 45}, x.options())")), "runtime_error:out_of_memory"),
    "torch does the work": (candidate(forward="ext.scaled_relu_rows(x)\nreturn torch.relu(x) * 1.5"), "cheating:disallowed_aten"),
    "operators do the work": (candidate(forward="ext.scaled_relu_rows(x)\nreturn x.clamp(min=0) * 1.5"), "cheating:disallowed_aten"),
    "ATen inside C++": (candidate("torch::Tensor scaled_relu_rows(torch::Tensor x) { return at::relu(x) * 1.5; }"), "cheating:disallowed_aten"),
    "decoy": (candidate(forward="y = x.clone()\ny[y < 0] = 0\nreturn y * 1.5"), "cheating:disallowed_aten"),
    "patched comparer": (candidate(top="torch.allclose = lambda *a, **k: True"), "cheating:patch"),
}  # fmt: skip


@pytest.fixture(scope="module")
def verdicts(evaluator, task):
    return dict(
        zip(KINDS, evaluator.verify_many([(task, source) for source, _ in KINDS.values()]), strict=True)
    )


@pytest.mark.parametrize("kind", KINDS)
def test_category(verdicts, kind):
    assert verdicts[kind].category == KINDS[kind][1], verdicts[kind].detail


def test_only_honest_work_is_rewarded(verdicts):
    for kind, verdict in verdicts.items():
        assert (verdict.reward >= 1) == kind.startswith("honest"), kind


def test_details_tell_what_to_fix(verdicts):
    assert (
        "cpp_sources:6" in verdicts["undeclared name"].detail
        and "scale" in verdicts["undeclared name"].detail
    )
    assert "__expf" in verdicts["undefined symbol"].detail
    assert "tile size" in verdicts["exception in C++"].detail
    assert (
        "aten::relu" in verdicts["ATen inside C++"].detail or "at::relu" in verdicts["ATen inside C++"].detail
    )
    for verdict in verdicts.values():
        assert str(Path.home()) not in (verdict.detail or "") and "site-packages" not in (
            verdict.detail or ""
        )


def test_tiers(verdicts):
    assert verdicts["honest"].evidence["builds"][0]["tier"] == "light"
    assert verdicts["honest, real headers only"].evidence["builds"][0]["tier"] == "full"


def test_alone_and_in_a_batch_the_verdict_is_the_same(verdicts, task):
    some = ("honest", "wrong value", "undeclared name", "undefined symbol", "ATen inside C++")
    with MooreEval("cpu", EvalConfig(trials=3, timeout_s=4.0, timing=False)) as fresh:
        for kind in some:
            alone = fresh.verify(task, KINDS[kind][0])
            assert (alone.category, alone.q) == (verdicts[kind].category, verdicts[kind].q), kind


def test_values_right_on_some_seeds_give_a_share(task):
    source = candidate(CPP.replace("return y;", "if (a[0] < 0.0f) b[0] += 1.0f;\n  return y;"))
    with MooreEval("cpu", EvalConfig(trials=12, timing=False, seed=3)) as fresh:
        first, second = fresh.verify(task, source), fresh.verify(task, source)
    assert 0 < first.q < 1 and first.reward == pytest.approx(-0.5 + 0.5 * first.q)
    assert (first.q, first.detail) == (second.q, second.detail)  # a seed makes verdicts reproducible


def test_no_process_is_left_and_the_next_job_is_untouched(evaluator, task):
    orphan = "subprocess.Popen([sys.executable, '-c', 'import signal,time,os\\nsignal.signal(15, signal.SIG_IGN)\\nif os.fork()==0: os.setsid()\\ntime.sleep(97531)'])"
    verdict = evaluator.verify(task, candidate(top=orphan))
    assert verdict.kind == "cheating"
    time.sleep(0.2)
    assert not [p for p in psutil.process_iter() if "97531" in " ".join(_command(p))]
    assert evaluator.verify(task, candidate()).category == "ok"


def _command(process):
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def test_the_sandbox_hides_the_network_and_the_file_system(evaluator, task):
    if evaluator.isolation != "namespaces":
        pytest.skip("this machine refuses namespaces")
    probe = """
import socket
reached = []
for folder in (os.path.expanduser("~"), "/etc", "/var"):
    try:
        open(os.path.join(folder, "musa_probe"), "w").close()
        reached.append(folder)
    except OSError:
        pass
try:
    socket.create_connection(("127.0.0.1", 9), 0.2)
except OSError as error:
    if error.errno != 101:
        reached.append(str(error))
reached += [p for p in os.listdir("/proc") if p.isdigit() and int(p) > 8]
if reached:
    raise RuntimeError("reached " + repr(reached))
"""
    verdict = evaluator.verify(task, candidate(top=probe))
    assert "reached" not in (verdict.detail or ""), verdict.detail
    assert not os.path.exists("/etc/musa_probe")


def test_timing_agrees_with_itself_and_needs_correctness(task):
    slow = candidate(
        CPP.replace(
            BODY,
            "for (int r = 0; r < 4000; ++r) { volatile float* v = b; for (int64_t i = 0; i < x.numel(); ++i) v[i] = a[i] > 0.0f ? a[i] * 1.5f : 0.0f; }",
        )
    )
    with MooreEval("cpu", EvalConfig(trials=2, timing_pairs=7)) as timed:
        fast, late, wrong = timed.verify_many(
            [(task, candidate()), (task, slow), (task, KINDS["wrong value"][0])]
        )
    assert fast.speedup > 10 * late.speedup
    assert wrong.speedup is None
    assert fast.evidence["timing"]["low"] <= fast.speedup <= fast.evidence["timing"]["high"]


def test_store_serves_the_second_time(tmp_path, task):
    config = EvalConfig(trials=2, timing=False, store=tmp_path / "verdicts.sqlite")
    with MooreEval("cpu", config) as first:
        made = first.verify(task, candidate())
    with MooreEval("cpu", config) as second:
        served = second.verify(task, f"Sure:\n```python\n{candidate()}```")
        assert second._zygote is None  # nothing was run
    assert served.category == made.category == "ok"
    assert served.candidate_sha256 != made.candidate_sha256  # of the raw response


def test_a_broken_task_is_the_callers_error(evaluator):
    broken = Task("broken", TASK.replace("torch.relu(x)", "torch.rely(x)"))
    with pytest.raises(TaskError, match="rely"):
        evaluator.verify(broken, candidate())
    verdicts = list(evaluator.verify_many([(broken, candidate()), (Task("fine", TASK), candidate())]))
    assert [v.category for v in verdicts] == ["infra:task", "ok"]


def test_unknown_backend_and_bad_settings():
    with pytest.raises(ValueError, match="backend"):
        MooreEval("tpu")
    with pytest.raises(ValueError, match="trials"):
        EvalConfig(trials=0)


def test_stream_keeps_every_index(evaluator, task):
    jobs = [(task, KINDS[kind][0]) for kind in ("honest", "prose", "honest", "wrong value")]
    assert sorted(index for index, _ in evaluator.verify_stream(jobs)) == [0, 1, 2, 3]
