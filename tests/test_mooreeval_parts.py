"""The verifier's parts that need no compiler: extraction, scans, comparison, frames, feedback."""

import json
import socket
import struct
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from musalib.mooreeval import feedback, judge, legality, wire
from musalib.mooreeval.cpp_source import scan
from musalib.mooreeval.diagnostics import tidy
from musalib.mooreeval.extract import ExtractError, extract
from musalib.mooreeval.requests import SAFE_FLAG, UNSAFE_FLAG, literal_requests
from musalib.python_source import parse
from musalib.verdict import Verdict

MODULE = "import torch\nclass ModelNew(torch.nn.Module):\n    pass\n"


@pytest.mark.parametrize(
    "response",
    [
        MODULE,
        f"Here it is:\n```python\n{MODULE}```\nDone.",
        f"```python\n{MODULE}",  # never closed
        f"<think>```python\nclass ModelNew: draft\n```</think>\n```python\n{MODULE}```",
        f"```cpp\nint x;\n```\n```python\n{MODULE}```",
        f"```python\nclass ModelNew: pass\n```\nbetter:\n```py\n{MODULE}```\n```python\nprint(1)\n```",
    ],
)
def test_extract_takes_the_last_block_that_defines_modelnew(response):
    assert extract(response).strip() == MODULE.strip()


@pytest.mark.parametrize(
    ("response", "category"),
    [
        ("I cannot do this.", "extract_error:no_code"),
        ("", "extract_error:no_code"),
        ("```python\nclass Model: pass\n```", "extract_error:no_modelnew"),
        ("class ModelNew:\n  def f(:\n", "compile_error:python_syntax"),
        (b"class ModelNew: pass  # \xff", "compile_error:encoding"),
    ],
)
def test_extract_names_what_is_missing(response, category):
    with pytest.raises(ExtractError) as error:
        extract(response)
    assert error.value.category == category


def test_parsing_in_many_threads_at_once():
    sources = [MODULE + "\n".join(f"x{i} = [{i}, {j}]" for i in range(300)) for j in range(24)]
    with ThreadPoolExecutor(8) as pool:
        assert [len(tree.body) for tree in pool.map(parse, sources)] == [302] * 24


# --- C++ scan ---------------------------------------------------------------------------------------------------
FUNCTION = "torch::Tensor f(torch::Tensor x) {\n  auto y = torch::empty_like(x);\n  return y;\n}\n"


def test_scan_sees_compute_but_not_comments_and_strings():
    assert scan(FUNCTION).findings == []
    quoted = FUNCTION.replace(
        "return y;", 'TORCH_CHECK(true, "at::matmul(a, b)");  // at::mm(x, x)\n  return y;'
    )
    assert scan(quoted).findings == []
    raw = FUNCTION.replace("return y;", 'const char* s = R"(at::mm(x, x))";\n  return y;')
    assert scan(raw).findings == []
    found = scan(FUNCTION.replace("return y;", "return at::matmul(x, x);")).findings
    assert [(f.rule, f.what, f.where) for f in found] == [("disallowed_aten", "at::matmul", "cpp_sources:3")]


@pytest.mark.parametrize(
    "source",
    [
        "static int calls = 0;\n" + FUNCTION,
        "#define MAX(a, b) a\n" + FUNCTION,
        "#include <fstream>\n" + FUNCTION,
        "template <class T> T g(T x) { return x; }\n" + FUNCTION,
        FUNCTION.replace("auto y", "static int n = 0; auto y"),
        FUNCTION.replace("auto y", "#pragma omp parallel for\n  auto y"),
        "struct S { int a; };\n" + FUNCTION,
        'extern "C" int g() { return 1; }\n' + FUNCTION,
    ],
)
def test_only_plain_function_definitions_share_a_translation_unit(source):
    assert scan(FUNCTION).plain
    assert not scan(source).plain


def test_unbalanced_source_is_incomplete():
    assert not scan(FUNCTION + "}").complete


# --- Python AST -------------------------------------------------------------------------------------------------
def rules(body: str, before: str = "", init: str = "pass") -> set[str]:
    indented = "\n".join("        " + line for line in body.splitlines())
    source = (
        "import torch, sys, gc, time\nimport torch.nn as nn\nimport torch.nn.functional as F\nimport numpy as np\n"
        f"{before}\nclass ModelNew(nn.Module):\n    def __init__(self):\n        super().__init__()\n        {init}\n"
        f"    def forward(self, x):\n{indented}\n"
    )
    return {finding.rule for finding in legality.python_findings(source)}


@pytest.mark.parametrize(
    ("body", "rule"),
    [
        ("return torch.matmul(x, x)", "disallowed_aten"),
        ("return F.relu(x)", "disallowed_aten"),
        ("return x @ x", "disallowed_aten"),
        ("return torch.ops.aten.mm(x, x)", "detour"),
        ("return torch.from_numpy(np.exp(x.numpy()))", "detour"),
        ("for m in sys.modules.values(): pass", "tampering"),
        ("for o in gc.get_objects(): pass", "tampering"),
        ("return eval('x + 1')", "tampering"),
        ("return torch.compile(lambda v: v)(x)", "detour"),
    ],
)
def test_forward_must_not_reach(body, rule):
    assert rule in rules(body)


def test_helpers_and_submodules_are_followed():
    assert "disallowed_aten" in rules("return helper(x)", before="def helper(v):\n    return torch.relu(v)")
    assert "disallowed_aten" in rules("return self.fc(x)", init="self.fc = nn.Linear(2, 2)")
    assert rules("return ext.linear(x, self.fc.weight)", init="self.fc = nn.Linear(2, 2)") == set()


def test_patches_hooks_and_overrides():
    assert "patch" in rules("return x", before="time.perf_counter = lambda: 0.0")
    assert "patch" in rules("return x", before="setattr(torch, 'allclose', None)")
    assert "hook" in rules("return x", init="self.register_forward_hook(lambda *a: a)")
    assert "override" in rules("return x", before="class T(nn.Module):\n    def __call__(self, x): return x")


def test_sizes_and_words_are_not_findings():
    assert (
        rules("# torch.matmul(x, x); pass\nn = x.size(0) * 2 // 3\nreturn ext.f(x.contiguous(), n)") == set()
    )


def test_trace_uses_the_papers_list_and_strips_overloads():
    assert legality.trace_findings(["aten::empty.memory_format", "aten::view", "aten::_to_copy"]) == []
    assert [f.what for f in legality.trace_findings(["aten::mm", "aten::empty"])] == ["aten::mm"]
    paper = [name for name, origin in legality.allowlist().items() if origin == "paper_appendix_j"]
    assert len(paper) == 42


# --- comparison -------------------------------------------------------------------------------------------------
def tensor(values, dtype="float32"):
    array = np.asarray(values, dtype=dtype)
    return {"t": "tensor", "dtype": dtype, "shape": list(array.shape), "bytes": array.nbytes}, memoryview(
        array.tobytes()
    )


def mismatch(expected, got, tolerance=None):
    found, _ = judge.compare(*expected, *got, tolerance)
    return found and found.kind


def test_zeros_do_not_pass_for_small_outputs():
    small = np.full(1000, 1e-6)
    assert mismatch(tensor(small), tensor(np.zeros(1000))) == "values"
    assert mismatch(tensor(small), tensor(small * (1 + 1e-6))) is None


def test_reordered_sums_pass_and_half_precision_does_not():
    rng = np.random.default_rng(0)
    terms = rng.standard_normal((64, 4096)).astype("float32")
    assert mismatch(tensor(terms.sum(1)), tensor(terms[:, ::-1].astype("float64").sum(1))) is None
    assert (
        mismatch(tensor(terms.sum(1)), tensor(terms.sum(1).astype("float16").astype("float32"))) == "values"
    )


def test_nan_and_inf_count_by_position():
    want = [1.0, np.nan, np.inf, -np.inf]
    assert mismatch(tensor(want), tensor(want)) is None
    assert mismatch(tensor(want), tensor([np.nan, 1.0, np.inf, -np.inf])) == "values"
    assert mismatch(tensor(want), tensor([1.0, np.nan, -np.inf, -np.inf])) == "values"
    assert mismatch(tensor([1.0, 2.0]), tensor([np.nan, np.nan])) == "values"


def test_structure_shape_and_dtype():
    a = tensor([[1.0, 2.0]])
    assert mismatch(a, tensor([1.0, 2.0])) == "shape"
    assert mismatch(a, tensor([[1.0, 2.0]], "float64")) == "dtype"
    assert mismatch(tensor([1, 2], "int64"), tensor([1, 3], "int64")) == "values"
    pair = ({"t": "tuple", "v": [a[0], a[0]]}, memoryview(bytes(a[1]) * 2))
    assert mismatch(pair, a) == "structure"
    assert mismatch(pair, pair) is None
    assert mismatch(a, ({"t": "bad", "why": "type Later"}, memoryview(b""))) == "structure"
    assert (
        mismatch(a, ({"t": "tensor", "dtype": "float32", "shape": [1, 2], "bytes": 1 << 40}, memoryview(b"")))
        == "structure"
    )
    assert mismatch(a, ({}, memoryview(b""))) == "structure"


def test_given_tolerance_replaces_the_default():
    assert mismatch(tensor([1.0]), tensor([1.05])) == "values"
    assert mismatch(tensor([1.0]), tensor([1.05]), tolerance=0.1) is None


# --- frames, flags, feedback ------------------------------------------------------------------------------------
def test_hostile_frames_are_errors_of_the_peer():
    ours, theirs = socket.socketpair()
    theirs.sendall(struct.pack("<IQ", 1 << 30, 0))
    with pytest.raises(wire.WireError, match="oversized"):
        wire.receive(ours, time.monotonic() + 1)
    ours, theirs = socket.socketpair()
    theirs.sendall(wire.HEAD.pack(3, 0) + b"[1]")
    with pytest.raises(wire.WireError, match="malformed"):
        wire.receive(ours, time.monotonic() + 1)
    ours, theirs = socket.socketpair()
    with pytest.raises(wire.WireTimeout):
        wire.receive(ours, time.monotonic() + 0.05)
    wire.send(theirs, {"a": 1}, b"xyz")
    assert wire.receive(ours, time.monotonic() + 1) == ({"a": 1}, bytearray(b"xyz"))


@pytest.mark.parametrize(
    "flag",
    [
        "-fplugin=x.so",
        "-Wl,-rpath,/x",
        "-B/x",
        "@file",
        "-I/etc",
        "-include/etc/passwd",
        "-fdump-tree-all=/x",
    ],
)
def test_dangerous_flags_are_refused(flag):
    assert not SAFE_FLAG.match(flag) or UNSAFE_FLAG.search(flag)


@pytest.mark.parametrize("flag", ["-O3", "-march=native", "-ffast-math", "-fopenmp", "-std=c++17", "-DN=4"])
def test_usual_flags_are_taken(flag):
    assert SAFE_FLAG.match(flag) and not UNSAFE_FLAG.search(flag)


def test_compiler_errors_lose_paths_and_keep_lines():
    text = "k0:7:12: error: 'foo' was not declared in this scope\n    7 |   foo(/usr/include/x.h);\ncompilation terminated."
    assert tidy(text).startswith("cpp_sources:7: error: 'foo' was not declared")
    assert "/usr" not in tidy(text)


def test_feedback_is_bounded_and_never_empty():
    for category in (
        "ok",
        "compile_error:cpp",
        "correctness_error:values",
        "cheating:detour",
        "runtime_error:timeout",
        "extract_error:no_code",
    ):
        text = feedback(Verdict(category, detail="x" * 5000))
        assert 0 < len(text) <= 1200
    with pytest.raises(ValueError, match="infra"):
        feedback(Verdict("infra:worker"))


def test_literal_requests_follow_names_and_give_up_on_the_rest():
    source = 'CPP = "int f();"\nload_inline(name="n", cpp_sources=[CPP + "\\n"], functions=["f"], extra_cflags=["-O2"])\n'
    (request,) = literal_requests(source)
    assert request.cpp == ("int f();\n",) and request.cflags == ("-O2",)
    assert literal_requests('load_inline(name="n", cpp_sources=make(), functions=["f"])') == []


def test_verdict_record_is_json():
    verdict = Verdict("ok", task="t", q=1.0, evidence={"trials": [{"max_abs": 0.0}]})
    assert Verdict.from_dict(json.loads(json.dumps(verdict.to_dict()))) == verdict
