"""Is the work done by native code written in the candidate? Three layers; this file holds the first and the third.

1. Python AST: what the module's code reaches (torch calls, submodules, hooks, patches, processes, other array libraries);
2. C++ scan (`cpp_source.py`): at::/torch:: compute inside the source string, embedded Python, processes;
3. dispatcher trace: top-level aten operators of every candidate forward, against Appendix J's list (data/*.csv).

A static finding is certain by construction of its rule. What needs types (operators, tensor methods) is left to the
trace, which sees them all, so that an honest `n * 2` on a size is never refused.
"""

from __future__ import annotations

import ast
import csv
from functools import cache
from pathlib import Path

from musalib.mooreeval.cpp_source import Finding, scan
from musalib.python_source import parse

ALLOWED_TORCH = {
    "empty", "empty_like", "empty_strided", "zeros", "zeros_like", "ones", "ones_like", "full", "full_like", "Size", "device",
    "dtype", "is_tensor", "Tensor", "no_grad", "inference_mode", "tensor", "as_tensor", "get_num_threads", "is_grad_enabled",
    "broadcast_shapes", "Generator", "finfo", "iinfo", "manual_seed", "from_numpy", "is_floating_point", "typename",
    "numel", "arange", "rand", "randn", "randint", "permute", "transpose", "reshape", "squeeze", "unsqueeze", "flatten",
    "broadcast_to", "clone", "select", "narrow", "split", "chunk", "unbind", "as_strided", "t", "movedim", "get_default_dtype",
}  # fmt: skip
DETOURS = {
    "numpy", "scipy", "numba", "jax", "jaxlib", "cupy", "sklearn", "pandas", "tensorflow", "triton", "ctypes", "cffi", "cython",
    "numexpr", "onnxruntime", "onnx", "tvm", "mlx", "einops", "opt_einsum", "torchvision", "torchaudio",
}  # fmt: skip
TAMPERING = {
    "sys",
    "gc",
    "inspect",
    "ctypes",
    "importlib",
    "subprocess",
    "multiprocessing",
    "socket",
    "signal",
    "threading",
    "pickle",
    "builtins",
    "_thread",
    "concurrent",
    "asyncio",
}
HARMLESS_MEMBERS = {
    "sys.path",
    "sys.version",
    "sys.version_info",
    "sys.platform",
    "sys.maxsize",
    "sys.executable",
    "gc.collect",
    "sys.exit",
    "sys.stdout",
    "sys.stderr",
}
HOOKS = {
    "register_forward_hook", "register_forward_pre_hook", "register_full_backward_hook", "register_module_forward_hook",
    "register_module_forward_pre_hook", "register_backward_hook", "register_state_dict_pre_hook",
}  # fmt: skip
OVERRIDES = {
    "__call__",
    "__torch_function__",
    "__torch_dispatch__",
    "__getattribute__",
    "_call_impl",
    "_wrapped_call_impl",
}
OS_CALLS = {
    "system",
    "popen",
    "fork",
    "forkpty",
    "kill",
    "killpg",
    "execv",
    "execve",
    "execvp",
    "execl",
    "posix_spawn",
    "spawnl",
    "spawnv",
    "_exit",
    "ptrace",
    "memfd_create",
    "dup",
    "dup2",
    "write",
    "open",
    "fdopen",
    "pipe",
}
BUILTINS = {
    "eval",
    "exec",
    "compile",
    "__import__",
    "open",
    "globals",
    "vars",
    "locals",
    "breakpoint",
    "input",
}
CONTAINERS = {"Parameter", "ParameterList", "ParameterDict", "Module", "ModuleList", "ModuleDict", "Buffer"}


def python_findings(source: str) -> list[Finding]:
    """Findings of layer 1 with file positions. `source` is known to parse."""
    return _Reader(parse(source)).read()


def cpp_findings(sources: list[str]) -> list[Finding]:
    return [finding for part in sources for finding in scan(part).findings]


@cache
def allowlist() -> dict[str, str]:
    """Operator -> where it comes from: the paper's Appendix J, or one of the additions kept apart."""
    path = Path(__file__).parent / "data/aten_allowlist.csv"
    with path.open(newline="") as handle:
        return {row["operator"]: row["origin"] for row in csv.DictReader(handle)}


def trace_findings(operators: list[str]) -> list[Finding]:
    """Layer 3: operators outside the allowlist; overload suffixes are stripped first."""
    allowed = allowlist()
    return [
        Finding("disallowed_aten", name, "forward")
        for name in sorted({str(o) for o in operators})
        if name.startswith("aten::") and name not in allowed and name.rpartition(".")[0] not in allowed
    ]


class _Reader:
    def __init__(self, tree: ast.Module) -> None:
        self.tree = tree
        self.names: dict[str, str] = {}  # local name -> dotted origin, for everything imported anywhere
        self.found: list[Finding] = []
        self.classes = {n.name: n for n in tree.body if isinstance(n, ast.ClassDef)}
        self.functions = {
            n.name: n for n in tree.body if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef))
        }

    def read(self) -> list[Finding]:
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    self.names[alias.asname or alias.name.split(".")[0]] = (
                        alias.name if alias.asname else alias.name.split(".")[0]
                    )
            elif isinstance(node, ast.ImportFrom) and node.module:
                for alias in node.names:
                    self.names[alias.asname or alias.name] = f"{node.module}.{alias.name}"
        for node in ast.walk(self.tree):
            self._anywhere(node)
        for function, owner in self._reachable():
            self._in_forward(function, owner)
        return list(dict.fromkeys(self.found))

    def add(self, rule: str, what: str, node: ast.AST) -> None:
        self.found.append(Finding(rule, what, f"candidate.py:{getattr(node, 'lineno', 0)}"))

    def dotted(self, node: ast.AST) -> str | None:
        """`F.linear` -> `torch.nn.functional.linear`; None when the root is no imported name."""
        parts: list[str] = []
        while isinstance(node, ast.Attribute):
            parts.append(node.attr)
            node = node.value
        if not isinstance(node, ast.Name) or node.id not in self.names:
            return None
        return ".".join([self.names[node.id], *reversed(parts)])

    # -- rules for the whole module: nothing honest needs these, at import time or later -----------------------------
    def _anywhere(self, node: ast.AST) -> None:
        if isinstance(node, (ast.Assign, ast.AugAssign, ast.AnnAssign, ast.Delete)):
            targets = node.targets if isinstance(node, (ast.Assign, ast.Delete)) else [node.target]
            for target in targets:
                if (
                    isinstance(target, ast.Attribute)
                    and (name := self.dotted(target))
                    and not _harmless_setting(name)
                ):
                    self.add("patch", f"assigns {name}", node)
        elif isinstance(node, ast.ClassDef):
            for base in node.bases:
                if (self.dotted(base) or "").startswith("torch.") and self.dotted(base) not in (
                    "torch.nn.Module",
                    "torch.nn.modules.module.Module",
                ):
                    self.add("subclass", f"class {node.name} inherits {self.dotted(base)}", node)
            for item in node.body:
                if isinstance(item, ast.FunctionDef) and item.name in OVERRIDES:
                    self.add("override", f"class {node.name} defines {item.name}", item)
        elif isinstance(node, ast.Attribute):
            name = self.dotted(node) or ""
            root, _, rest = name.partition(".")
            if node.attr in HOOKS:
                self.add("hook", f"uses {node.attr}", node)
            elif root == "os" and rest in OS_CALLS:
                self.add("process", f"uses {name}", node)
            elif (
                root in TAMPERING
                and rest
                and name not in HARMLESS_MEMBERS
                and not any(h.startswith(name + ".") for h in HARMLESS_MEMBERS)
            ):
                self.add("tampering", f"uses {name}", node)
            elif name.startswith(
                ("torch.set_num", "torch.set_default", "torch.set_flush", "torch.set_float32")
            ):
                self.add("patch", f"uses {name}", node)
            elif name in (
                "torch.compile",
                "torch.jit",
                "torch.ops",
                "torch._C",
                "torch._dynamo",
                "torch._inductor",
                "torch.overrides",
                "torch.fx",
                "torch.export",
                "torch.func",
                "torch.library",
                "torch.utils._python_dispatch",
                "torch.profiler",
                "torch.autograd",
            ):
                self.add("detour", f"uses {name}", node)
            elif node.attr in (
                "__globals__",
                "__code__",
                "__subclasses__",
                "__builtins__",
                "f_back",
                "f_globals",
                "f_locals",
                "tb_frame",
                "_getframe",
            ):
                self.add("tampering", f"uses {node.attr}", node)
        elif isinstance(node, ast.Call):
            function = node.func
            if isinstance(function, ast.Name):
                origin = self.names.get(function.id, "")
                if (
                    function.id in ("setattr", "delattr")
                    and node.args
                    and (self.dotted(node.args[0]) or "").split(".")[0]
                    in ("torch", "time", "builtins", "sys")
                ):
                    self.add("patch", f"{function.id} on {self.dotted(node.args[0])}", node)
                elif function.id in BUILTINS and function.id not in self.functions:
                    self.add("tampering", f"calls {function.id}()", node)
                elif origin.split(".")[0] in TAMPERING and origin not in HARMLESS_MEMBERS:
                    self.add("tampering", f"calls {origin}()", node)
                elif origin.startswith("os.") and origin[3:] in OS_CALLS:
                    self.add("process", f"calls {origin}()", node)

    # -- rules for what forward reaches ----------------------------------------------------------------------------
    def _reachable(self) -> list[tuple[ast.AST, ast.ClassDef | None]]:
        """`ModelNew.forward` and every function, method and local class that it names, transitively."""
        model = self.classes.get("ModelNew")
        if model is None:
            return []
        todo: list[tuple[ast.AST, ast.ClassDef | None]] = [
            (f, model) for f in self._methods(model, "forward")
        ]
        seen: list[tuple[ast.AST, ast.ClassDef | None]] = []
        while todo:
            function, owner = todo.pop()
            if any(f is function for f, _ in seen):
                continue
            seen.append((function, owner))
            for node in ast.walk(function):
                if isinstance(node, ast.Name) and node.id in self.functions:
                    todo.append((self.functions[node.id], None))
                elif (
                    isinstance(node, ast.Attribute)
                    and isinstance(node.value, ast.Name)
                    and node.value.id == "self"
                    and owner is not None
                ):
                    todo += [(f, owner) for f in self._methods(owner, node.attr)]
                    for child in self._submodules(owner).get(node.attr, []):
                        if child in self.classes:
                            todo += [
                                (f, self.classes[child])
                                for f in self._methods(self.classes[child], "forward")
                            ]
        return seen

    def _methods(self, cls: ast.ClassDef, name: str) -> list[ast.AST]:
        own = [
            n for n in cls.body if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef)) and n.name == name
        ]
        if own:
            return own
        return [f for base in cls.bases if isinstance(base, ast.Name) and base.id in self.classes and base.id != cls.name
                for f in self._methods(self.classes[base.id], name)]  # fmt: skip

    def _submodules(self, cls: ast.ClassDef) -> dict[str, list[str]]:
        """Attributes of self that hold modules, with the class each was made from."""
        out: dict[str, list[str]] = {}
        for node in ast.walk(cls):
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
                made = self.dotted(node.value.func) or (
                    node.value.func.id if isinstance(node.value.func, ast.Name) else ""
                )
                for target in node.targets:
                    if (
                        isinstance(target, ast.Attribute)
                        and isinstance(target.value, ast.Name)
                        and target.value.id == "self"
                    ):
                        out.setdefault(target.attr, []).append(made)
        return out

    def _in_forward(self, function: ast.AST, owner: ast.ClassDef | None) -> None:
        modules = self._submodules(owner) if owner is not None else {}
        for node in ast.walk(function):
            if isinstance(node, ast.BinOp) and isinstance(node.op, ast.MatMult):
                self.add("disallowed_aten", "operator @", node)
            if isinstance(node, ast.Attribute) or (isinstance(node, ast.Name) and node.id in self.names):
                name = self.dotted(node) or ""
                if name.split(".")[0] in DETOURS:
                    self.add("detour", f"uses {name}", node)
            if not isinstance(node, ast.Call):
                continue
            name = self.dotted(node.func) or ""
            parts = name.split(".")
            if name.startswith(
                ("torch.nn.functional.", "torch.linalg.", "torch.special.", "torch.fft.", "torch.nn.init.")
            ):
                self.add("disallowed_aten", name, node)
            elif name.startswith("torch.nn.") and parts[-1][:1].isupper() and parts[-1] not in CONTAINERS:
                self.add("disallowed_aten", f"{name} made inside forward", node)
            elif (
                len(parts) == 2
                and parts[0] == "torch"
                and parts[1] not in ALLOWED_TORCH
                and not parts[1].startswith(
                    ("float", "int", "bfloat", "half", "uint", "bool", "double", "long")
                )
            ) or name.startswith("torch.Tensor."):
                self.add("disallowed_aten", name, node)
            elif (
                isinstance(node.func, ast.Attribute)
                and isinstance(node.func.value, ast.Name)
                and node.func.value.id == "self"
            ):
                for made in modules.get(node.func.attr, []):
                    if made.startswith("torch.nn.") and made.split(".")[-1] not in CONTAINERS:
                        self.add(
                            "disallowed_aten", f"calls the submodule self.{node.func.attr} ({made})", node
                        )


def _harmless_setting(name: str) -> bool:
    return name.startswith("os.environ")
