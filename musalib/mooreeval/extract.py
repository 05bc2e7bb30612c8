"""From a raw model response to the source of one Python module that defines `class ModelNew`."""

from __future__ import annotations

import re

from musalib.python_source import PARSE_ERRORS, parse

# An opening fence at the start of a line; the closing one may be missing when the response was cut off.
FENCE = re.compile(
    r"^[ \t]*(`{3,}|~{3,})[ \t]*([\w+-]*)[^\n]*\n(.*?)(?:^[ \t]*\1[ \t]*$|\Z)", re.MULTILINE | re.DOTALL
)
DEFINES_MODEL = re.compile(r"^class\s+ModelNew\b", re.MULTILINE)
PYTHON_TAGS = {"", "python", "py", "python3"}


class ExtractError(ValueError):
    """`category` is the verdict's category; the message is its detail."""

    def __init__(self, category: str, message: str) -> None:
        super().__init__(message)
        self.category = category


def extract(response: str | bytes) -> str:
    """Source after the last `</think>`: the LAST python block that defines `class ModelNew`, else a bare module."""
    if isinstance(response, bytes):
        try:
            response = response.decode("utf-8")
        except UnicodeDecodeError as error:
            raise ExtractError(
                "compile_error:encoding", f"the response is not valid UTF-8 (byte {error.start})"
            ) from error
    if "\x00" in response or any("\ud800" <= c <= "\udfff" for c in response):
        raise ExtractError("compile_error:encoding", "the response holds bytes that are not valid text")
    answer = response.rpartition("</think>")[2].replace("\r\n", "\n")
    blocks = [body for _, tag, body in FENCE.findall(answer) if tag.lower() in PYTHON_TAGS]
    for body in reversed(blocks):
        if DEFINES_MODEL.search(body):
            return _checked(body)
    if blocks:
        raise ExtractError("extract_error:no_modelnew", "no python block defines `class ModelNew`")
    if not DEFINES_MODEL.search(answer):
        what = (
            "the response is empty"
            if not answer.strip()
            else "the response holds no python block and no `class ModelNew`"
        )
        raise ExtractError("extract_error:no_code", what)
    return _checked(answer)


def _checked(source: str) -> str:
    try:
        parse(source)
    except PARSE_ERRORS as error:
        line = getattr(error, "lineno", None)
        where = f"candidate.py:{line}: " if line else ""
        message = getattr(error, "msg", None) or str(error)
        raise ExtractError(
            "compile_error:python_syntax", f"{where}{type(error).__name__}: {message}"
        ) from error
    return source
