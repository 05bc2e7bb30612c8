"""What a C++ source string holds, read with a real parser (tree-sitter), never with patterns over raw text."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache

import tree_sitter_cpp
from tree_sitter import Language, Node, Parser

# Headers that the light stand-in already includes: their guards make a second include empty.
LIGHT_INCLUDES = {
    "torch/extension.h", "torch/types.h", "torch/torch.h", "algorithm", "array", "cfloat", "climits", "cmath", "cstddef",
    "cstdint", "cstdlib", "cstring", "functional", "initializer_list", "limits", "numeric", "optional", "stdexcept",
    "string", "tuple", "type_traits", "utility", "vector", "math.h", "stdint.h",
}  # fmt: skip
TORCH_HEADERS = {"torch/extension.h", "torch/types.h", "torch/torch.h"}
# Free functions of torch's C++ API that allocate, look or convert; all others compute.
ALLOWED_TORCH_CALLS = {
    "empty", "empty_like", "empty_strided", "zeros", "zeros_like", "ones", "ones_like", "full", "full_like", "TensorOptions",
    "dtype", "device", "Device", "layout", "requires_grad", "Scalar", "IntArrayRef", "from_blob", "NoGradGuard", "Tensor",
    "str", "toString", "typeMetaToScalarType", "elementSize", "get_num_threads", "parallel_for", "wrap_pybind_function",
    "isFloatingType", "isIntegralType", "ScalarType", "ArrayRef", "InferenceMode", "Half", "BFloat16", "optional",
    "TensorBase", "SmallVector", "nullopt", "vec", "Generator", "checked_cast", "make_tuple", "get", "Error", "irange",
}  # fmt: skip
COMPUTE_NAMESPACES = {"nn", "linalg", "fft", "special", "sparse", "jit", "native", "_ops", "cpu"}
FORBIDDEN_CALLS = {
    "system",
    "popen",
    "fork",
    "vfork",
    "execv",
    "execl",
    "execve",
    "execvp",
    "dlopen",
    "dlsym",
    "ptrace",
    "clone3",
    "process_vm_readv",
}
FORBIDDEN_NAMES = {
    "RecordFunction",
    "addGlobalCallback",
    "clearCallbacks",
    "disableRecordFunction",
    "clearGlobalCallbacks",
    "RecordFunctionGuard",
}


@dataclass(frozen=True)
class Finding:
    """One reason why a candidate is not legal: a rule, the operator or name, and where it stands."""

    rule: str
    what: str
    where: str

    def __str__(self) -> str:
        return f"{self.where}: {self.what}"


@dataclass
class CppScan:
    complete: bool = True  # the parser met no error
    plain: bool = (
        True  # only function definitions and harmless includes at file scope: may share a translation unit
    )
    defined: set[str] = field(default_factory=set)
    includes: list[str] = field(default_factory=list)
    binding: bool = False  # PYBIND11_MODULE or TORCH_LIBRARY by hand
    findings: list[Finding] = field(default_factory=list)


@cache
def _parser() -> Parser:
    return Parser(Language(tree_sitter_cpp.language()))


def walk(node: Node) -> Iterator[Node]:
    """Depth first, without recursion: hostile nesting is only long, never an error."""
    stack = [node]
    while stack:
        current = stack.pop()
        yield current
        stack.extend(reversed(current.children))


def text(node: Node | None) -> str:
    return node.text.decode("utf-8", "replace") if node is not None and node.text else ""


def scan(source: str, where: str = "cpp_sources") -> CppScan:
    root = _parser().parse(source.encode("utf-8", "replace")).root_node
    out = CppScan(complete=not root.has_error)
    for child in root.children:
        _file_scope(child, out)
    for node in walk(root):
        _inside(node, out, where)
    return out


def _file_scope(node: Node, out: CppScan) -> None:
    if node.type == "comment" or node.type == ";":
        return
    if node.type == "preproc_include":
        name = text(node.child_by_field_name("path")).strip('<>"')
        out.includes.append(name)
        out.plain &= name in LIGHT_INCLUDES
        return
    if node.type == "function_definition":
        declarator = node.child_by_field_name("declarator")
        while declarator is not None and declarator.type in ("pointer_declarator", "reference_declarator"):
            declarator = declarator.children[-1]
        name = declarator.child_by_field_name("declarator") if declarator is not None else None
        if (
            declarator is None
            or declarator.type != "function_declarator"
            or name is None
            or name.type != "identifier"
        ):
            out.plain = False
            return
        out.defined.add(text(name))
        extra = {c.type for c in node.children}
        out.plain &= not extra & {"attribute_declaration", "attribute_specifier", "ms_call_modifier", "ERROR"}
        return
    out.plain = False


# Inside functions these make a shared translation unit unsafe or its meaning different from a file of its own.
UNSHARED = {
    "preproc_def", "preproc_function_def", "preproc_call", "preproc_if", "preproc_ifdef", "preproc_include", "asm_statement",
    "gnu_asm_expression", "attribute_specifier", "attribute_declaration", "template_declaration", "class_specifier",
    "struct_specifier", "union_specifier", "enum_specifier", "using_declaration", "linkage_specification",
}  # fmt: skip


def _inside(node: Node, out: CppScan, where: str) -> None:
    kind = node.type
    line = f"{where}:{node.start_point[0] + 1}"
    if kind in UNSHARED and not (
        kind == "preproc_include" and node.parent is not None and node.parent.type == "translation_unit"
    ):
        out.plain = False
    elif kind == "storage_class_specifier" and text(node) in ("static", "extern", "thread_local"):
        # a file-scope `static` function is fine; a static local keeps state between calls
        if node.parent is None or node.parent.type != "function_definition":
            out.plain = False
    elif kind == "qualified_identifier":
        if text(node).startswith("::") or (
            node.parent is not None and node.parent.type == "function_declarator"
        ):
            out.plain = False
        _qualified(node, out, line)
    elif kind == "call_expression":
        name = text(node.child_by_field_name("function"))
        if name.removeprefix("::").removeprefix("std::") in FORBIDDEN_CALLS:
            out.findings.append(Finding("process", f"calls {name}()", line))
    elif kind == "identifier" or kind == "namespace_identifier":
        name = text(node)
        if name in ("PYBIND11_MODULE", "TORCH_LIBRARY", "TORCH_LIBRARY_IMPL", "TORCH_LIBRARY_FRAGMENT"):
            out.binding, out.plain = True, False
        elif name in FORBIDDEN_NAMES:
            out.findings.append(Finding("tampering", f"touches {name}", line))
        elif name in ("pybind11", "py") and kind == "namespace_identifier":
            out.plain = False


def _qualified(node: Node, out: CppScan, line: str) -> None:
    if node.parent is not None and node.parent.type == "qualified_identifier":
        return
    parts = [p.split("<")[0] for p in text(node).replace(" ", "").strip(":").split("::")]
    called = node.parent is not None and node.parent.type in ("call_expression", "template_function")
    computes = len(parts) > 2 and parts[1] in COMPUTE_NAMESPACES
    computes |= len(parts) == 2 and parts[1] not in ALLOWED_TORCH_CALLS and not parts[1].startswith("k")
    if called and parts[0] in ("torch", "at", "aten") and computes:
        out.findings.append(Finding("disallowed_aten", "::".join(parts), line))
    if parts[0] in ("py", "pybind11") and any(
        p in ("module", "module_", "exec", "eval", "import") for p in parts[1:]
    ):
        out.findings.append(Finding("embedded_python", "::".join(parts), line))
