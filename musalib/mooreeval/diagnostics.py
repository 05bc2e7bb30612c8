"""Compiler and linker messages, made short and free of this machine's paths."""

from __future__ import annotations

import re
import shutil
import subprocess


def demangle(symbol: str) -> str:
    done = (
        subprocess.run(["c++filt", symbol], capture_output=True, text=True, check=False)
        if shutil.which("c++filt")
        else None
    )
    return done.stdout.strip() if done and done.stdout.strip() else symbol


def tidy(text: str) -> str:
    """The compiler's first error in the candidate's own line numbers, without paths of this machine."""
    lines = [line for line in text.splitlines() if "compilation terminated" not in line]
    at = next(
        (
            i
            for i, line in enumerate(lines)
            if re.search(r": (fatal )?error: |undefined reference|ld returned", line)
        ),
        0,
    )
    picked = []
    for line in lines[at : at + 4]:
        line = re.sub(r"^k\d+:(\d+)(?::\d+)?:", r"cpp_sources:\1:", line)
        line = re.sub(r"^binding:\d+(?::\d+)?:", "functions:", line)
        line = re.sub(r"(/[\w.+-]+)+/", "", line)
        picked.append(line.rstrip())
    return "\n".join(picked)[:1200] or "the compiler failed without a message"
