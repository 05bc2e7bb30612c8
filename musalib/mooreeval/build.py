"""From a `load_inline` request to a shared object, cheaply, with the verdict that the plain path would reach.

Tier 0 compiles against the light header. What it accepts is parsed once more against the real headers, and only a
source that passes both is used from there. What it refuses is parsed against the real headers: an error found there is
the candidate's, anything else goes to tier 2, which compiles with the flags and the text that `load_inline` uses.
An error is never reported from the light header alone.

Sources that hold nothing but function definitions share one translation unit (`prefetch`), which brings a candidate
down to a few milliseconds. Sharing is decided by a parse: no global, no macro, no template, no name that the headers
know, internal linkage.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from musalib.mooreeval import cpp_source
from musalib.mooreeval.diagnostics import demangle, tidy
from musalib.mooreeval.requests import BuildRequest, refusal
from musalib.mooreeval.toolchain import LIGHT_FLAGS, Toolchain

END = "MUSA_END_OF_CANDIDATE"
MARKED_ERROR = re.compile(r"^(?:In file included.*\n)?(k\d+):\d+(?::\d+)?: (?:fatal )?error: ", re.MULTILINE)


@dataclass(frozen=True)
class Built:
    """`error` None: `path` is the shared object and `symbols` maps functions to C entries (None: a pybind module)."""

    tier: str
    path: Path | None = None
    symbols: dict[str, str] | None = None
    category: str | None = None
    error: str | None = None


@dataclass(frozen=True)
class Refused:
    """What the light header's compiler said: which of the group, and symbols that nothing defines."""

    blamed: set[int]
    undefined: list[str]


class Builder:
    """Thread-safe; results are kept for the life of the builder, so that a duplicate source is built once."""

    def __init__(
        self, toolchain: Toolchain, folder: Path, timeout_s: float = 120.0, plain: bool = False
    ) -> None:
        """`plain`: every build through torch's own load_inline, for comparison."""
        self.toolchain, self.folder, self.timeout_s, self.plain = toolchain, folder, timeout_s, plain
        self.done: dict[str, Built] = {}
        self.counts: dict[str, int] = {}
        self._lock = threading.Lock()
        self._running: dict[str, threading.Event] = {}
        self._symbols: dict[str, bool] = {}  # undefined in a plain build as well

    # -- one request ------------------------------------------------------------------------------------------------
    def build(self, request: BuildRequest) -> Built:
        with self._lock:
            if found := self.done.get(request.key):
                return found
            if event := self._running.get(request.key):
                mine = None
            else:
                mine = event = self._running[request.key] = threading.Event()
        if mine is None:
            event.wait(self.timeout_s * 4)
            return self.done.get(request.key) or self._fresh(request)
        try:
            return self._keep(request, self._fresh(request))
        finally:
            with self._lock:
                self._running.pop(request.key, None)
            event.set()

    def _keep(self, request: BuildRequest, built: Built) -> Built:
        with self._lock:
            self.done[request.key] = built
            self.counts[built.tier] = self.counts.get(built.tier, 0) + 1
        return built

    def _fresh(self, request: BuildRequest) -> Built:
        with tempfile.TemporaryDirectory(dir=self.folder, prefix="b") as name:
            work = Path(name)
            try:
                return self._tiered(request, work)
            except subprocess.TimeoutExpired:
                return Built(
                    "none",
                    category="compile_error:timeout",
                    error=f"compilation took longer than {self.timeout_s:g} s",
                )

    def _tiered(self, request: BuildRequest, work: Path) -> Built:
        if refused := refusal(request):
            return Built("none", category=refused[0], error=refused[1])
        if self.plain:
            return self._plain(request, work)
        error = self._oracle([request], work)
        if error is not None:
            return Built("oracle", category="compile_error:cpp", error=error)
        if request.simple_flags and request.functions and not cpp_source.scan(request.source).binding:
            light = self._light([request], work)
            if isinstance(light, dict):
                return light[request.key]
            if symbol := self._missing_symbol(light, work):
                return Built("oracle", category="compile_error:link", error=f"undefined symbol: {symbol}")
        return self._full(request, work)

    # -- many requests ----------------------------------------------------------------------------------------------
    def prefetch(self, requests: Iterable[BuildRequest]) -> None:
        """Build what may share a translation unit; the rest is left to `build`. Never fails."""
        fresh = {
            r.key: r for r in requests if not self.plain and r.key not in self.done and self._may_share(r)
        }
        by_flags: dict[tuple[str, ...], list[BuildRequest]] = {}
        for request in fresh.values():
            by_flags.setdefault(request.cflags, []).append(request)
        for group in by_flags.values():
            for start in range(0, len(group), 128):
                self._shared(group[start : start + 128])

    def _may_share(self, request: BuildRequest) -> bool:
        if not request.simple_flags or not request.functions:
            return False
        if any(missing and symbol in request.source for symbol, missing in self._symbols.items()):
            return False  # it would only fail the link of everything it is built with
        scan = cpp_source.scan(request.source)
        return (
            scan.complete
            and scan.plain
            and not scan.defined & self.toolchain.header_names
            and set(request.functions) <= scan.defined
        )

    def _shared(self, group: list[BuildRequest]) -> None:
        with tempfile.TemporaryDirectory(dir=self.folder, prefix="s") as name:
            try:
                alive = group
                for _ in range(4):  # each round drops what the last one blamed
                    light = self._light(alive, Path(name)) if alive else {}
                    if isinstance(light, dict):
                        break
                    alive = [r for i, r in enumerate(alive) if i not in light.blamed] if light.blamed else []
                else:
                    return
                for _ in range(8):
                    error = self._oracle(alive, Path(name)) if alive else None
                    if error is None:
                        break
                    blamed = MARKED_ERROR.match(error)
                    if blamed is None:
                        return
                    alive.pop(int(blamed[1][1:]))
                else:
                    return
                for request in alive:
                    self._keep(request, light[request.key])
            except subprocess.TimeoutExpired:
                return

    # -- compilers --------------------------------------------------------------------------------------------------
    def _light(self, group: list[BuildRequest], work: Path) -> dict[str, Built] | Refused:
        """Compile the group against the light header: results by key, or who was to blame."""
        include = self.toolchain.prepare_light(group[0].optimisation)
        lines, symbols = ["#include <torch/extension.h>"], []
        for index, request in enumerate(group):
            space = f"musa_k{index}_" if len(group) > 1 else ""
            lines += [
                f"namespace {space} {{" if space else "",
                f'#line 1 "k{index}"',
                request.source,
                f'#line 1 "e{index}"',
                "}" if space else "",
            ]
            names = {f: f"musa_bind_{index}_{n}" for n, f in enumerate(request.functions or ())}
            for function, symbol in names.items():
                lines.append(
                    f'extern "C" __attribute__((visibility("default"))) int32_t {symbol}(const musa_value* a, int32_t n, musa_value* o)'
                    f" {{ return musa_light::call(&{space}::{function}, a, n, o); }}"
                )
            symbols.append(names)
        (work / "light.cpp").write_text("\n".join(lines) + "\n", encoding="utf-8")
        target = work / "light.so"
        flags = [
            *LIGHT_FLAGS,
            *group[0].cflags,
            "-w",
            f"-I{include}",
            f"-I{Path(__file__).parent / 'native/light'}",
        ]
        link = [
            "-shared",
            f"-L{self.toolchain.folder}",
            "-l:musa_shim.so",
            "-Wl,--no-undefined",
            "-Wl,--no-demangle",
        ]
        done = self.toolchain.run([*flags, "light.cpp", "-o", str(target), *link], self.timeout_s, work)
        if done.returncode == 0:
            final = self.folder / f"{group[0].key}-{len(group)}.so"
            shutil.move(target, final)
            return {r.key: Built("light", final, names) for r, names in zip(group, symbols, strict=True)}
        blamed = {int(m) for m in re.findall(r"^[ke](\d+):\d+", done.stderr, re.MULTILINE)}
        blamed |= {int(m) for m in re.findall(r"\d+musa_k(\d+)_", done.stderr)}
        return Refused(
            blamed, sorted(set(re.findall(r"undefined reference to [`']([A-Za-z_]\w*)'", done.stderr)))
        )

    def _missing_symbol(self, refused: Refused, work: Path) -> str | None:
        """A symbol that a plain build lacks too: the extension would compile there and fail to load."""
        for symbol in refused.undefined:
            if symbol not in self._symbols:
                (work / "symbol.cpp").write_text(
                    f'extern "C" void {symbol}();\nvoid* musa_probe() {{ return (void*)&{symbol}; }}\n'
                )
                arguments = [
                    "-w",
                    "-fPIC",
                    "symbol.cpp",
                    "-o",
                    "symbol.so",
                    "-fopenmp",
                    *self.toolchain.full_link_flags,
                    "-Wl,--no-undefined",
                ]
                done = self.toolchain.run(arguments, self.timeout_s, work)
                self._symbols[symbol] = "undefined reference" in done.stderr
            if self._symbols[symbol]:
                return demangle(symbol)
        return None

    def _oracle(self, group: list[BuildRequest], work: Path) -> str | None:
        """Parse against the real headers; None when clean, else the compiler's first error.

        The assertion at the end stops the compiler before it generates anything, which is what makes this cheap.
        """
        lines = ["#include <torch/extension.h>"]
        for index, request in enumerate(group):
            lines += [
                f"namespace musa_k{index}_ {{" if len(group) > 1 else "",
                f'#line 1 "k{index}"',
                request.source,
                "}" if len(group) > 1 else "",
            ]
            if len(group) == 1:
                lines += ['#line 1 "binding"', *_binding(request)]
        lines += ['#line 1 "end"', f'static_assert(false, "{END}");']
        (work / "oracle.cpp").write_text("\n".join(lines) + "\n", encoding="utf-8")
        flags = [*self.toolchain.full_flags, *(f for f in group[0].cflags if not f.startswith("-O"))]
        done = self.toolchain.run(
            [
                *flags,
                f"-I{self.toolchain.full_include}",
                "-Wfatal-errors",
                "-w",
                "-fsyntax-only",
                "oracle.cpp",
            ],
            self.timeout_s,
            work,
        )
        if f"static assertion failed: {END}" in done.stderr:
            return None
        found = re.search(
            r"^(k\d+|binding|end|.*):(\d+)(?::\d+)?: (?:fatal )?error: .*", done.stderr, re.MULTILINE
        )
        if found is None:
            return None  # no error and no end: leave the decision to the full compile
        return done.stderr[found.start() :] if len(group) > 1 else tidy(done.stderr)

    def _full(self, request: BuildRequest, work: Path) -> Built:
        """Tier 2: the text and the flags of `load_inline`, with this machine's precompiled torch/extension.h."""
        source = "\n".join(
            [
                *(["#include <torch/extension.h>"] if request.implicit_headers else []),
                '#line 1 "k0"',
                request.source,
                '#line 1 "binding"',
                *_binding(request),
            ]
        )
        (work / "main.cpp").write_text(source + "\n", encoding="utf-8")
        target = work / "full.so"
        flags = [*self.toolchain.full_flags, *request.cflags, "-w", f"-I{self.toolchain.full_include}"]
        done = self.toolchain.run(
            [*flags, "main.cpp", "-o", str(target), *self.toolchain.full_link_flags, *request.ldflags],
            self.timeout_s,
            work,
        )
        if done.returncode != 0:
            return Built("full", category="compile_error:cpp", error=tidy(done.stderr))
        final = self.folder / f"{request.key}-full.so"
        shutil.move(target, final)
        return Built("full", final, None)

    def _plain(self, request: BuildRequest, work: Path) -> Built:
        (work / "request.json").write_text(json.dumps(request.__dict__))
        done = self.toolchain.run(
            ["-m", "musalib.mooreeval.plain_build", str(work / "request.json"), str(work)],
            self.timeout_s,
            program=sys.executable,
        )
        if done.returncode != 0:
            return Built(
                "plain",
                category="compile_error:cpp",
                error=tidy(re.sub(r"(?m)^.*main\.cpp:", "k0:", done.stderr)),
            )
        final = self.folder / f"{request.key}-plain.so"
        shutil.move(work / "musa_ext.so", final)
        return Built("plain", final, None)


def _binding(request: BuildRequest) -> list[str]:
    if not request.functions:
        return []
    bind = (lambda f: f"torch::wrap_pybind_function({f})") if request.error_handling else (lambda f: f)
    body = [f'm.def("{f}", {bind(f)}, "{f}");' for f in request.functions]
    return ["PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {", *body, "}"]
