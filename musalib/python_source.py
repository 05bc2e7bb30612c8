"""Parsing of Python text that nobody has read."""

from __future__ import annotations

import ast
import functools
import threading

_parsing = threading.Lock()


@functools.lru_cache(maxsize=1024)
def parse(source: str) -> ast.Module:
    """`ast.parse`, one thread at a time: CPython 3.11 raises SystemError when two threads convert trees at once.

    Raises SyntaxError, ValueError (null bytes), RecursionError or MemoryError (hostile nesting). The tree is shared
    between callers: read it, never change it.
    """
    with _parsing:
        return ast.parse(source)


PARSE_ERRORS = (SyntaxError, ValueError, RecursionError, MemoryError)
