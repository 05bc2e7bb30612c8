"""Tensors and plain Python values as a JSON description plus raw bytes.

`encode` and `decode` run in the sandboxed workers and know torch. The judge reads the same description with numpy
(`judge.py`) and never executes anything that came over the wire: `pickle` items exist only in what the reference
sends to the candidate, and the judge passes those bytes on unread.
"""

from __future__ import annotations

import base64
import pickle
from typing import Any

import torch

# Held from before any candidate code ran, so that a patched torch cannot change what the runner does.
_Tensor, _Parameter = torch.Tensor, torch.nn.Parameter
_empty, _frombuffer, _as_strided = torch.empty, torch.frombuffer, torch.as_strided
_contiguous, _detach, _cpu, _view_dtype = _Tensor.contiguous, _Tensor.detach, _Tensor.cpu, _Tensor.view
_numpy, _strided, _uint8, _reshape = _Tensor.numpy, torch.strided, torch.uint8, _Tensor.reshape


def tensor_bytes(tensor: torch.Tensor) -> bytes:
    """Raw bytes of a tensor in row-major order."""
    flat = _reshape(_contiguous(_cpu(_detach(tensor))), (-1,))
    return _numpy(_view_dtype(flat, _uint8)).tobytes() if flat.numel() else b""


def encode(value: Any, allow_pickle: bool = True) -> tuple[Any, bytes]:
    """-> (description, payload). Without `allow_pickle` an unknown object becomes `{"t": "bad", "why": ...}`."""
    parts: list[bytes] = []

    def walk(item: Any) -> Any:
        if item is None or (isinstance(item, (bool, str)) and type(item) in (bool, str)):
            return {"t": "value", "v": item}
        if type(item) in (int, float):
            return {"t": type(item).__name__, "v": repr(item)}
        if type(item) in (_Tensor, _Parameter):
            if item.layout is not _strided:
                return {"t": "bad", "why": f"layout {item.layout}"}
            parts.append(tensor_bytes(item))
            dense = item.is_contiguous()
            return {
                "t": "tensor", "dtype": str(item.dtype).removeprefix("torch."), "shape": list(item.shape),
                "stride": None if dense else list(item.stride()), "bytes": len(parts[-1]), "grad": bool(item.requires_grad),
                "parameter": type(item) is _Parameter,
            }  # fmt: skip
        if type(item) in (list, tuple):
            return {"t": type(item).__name__, "v": [walk(x) for x in item]}
        if type(item) is dict and all(type(k) is str for k in item):
            return {"t": "dict", "v": [[k, walk(x)] for k, x in item.items()]}
        if not allow_pickle:
            return {"t": "bad", "why": f"type {type(item).__name__}"}
        return {"t": "pickle", "v": base64.b64encode(pickle.dumps(item)).decode()}

    description = walk(value)
    return description, b"".join(parts)


def decode(description: Any, payload: bytes | bytearray | memoryview) -> Any:
    """The value again; tensors own fresh memory and keep their strides."""
    view, offset = memoryview(payload), 0

    def walk(item: Any) -> Any:
        nonlocal offset
        kind = item["t"]
        if kind == "value":
            return item["v"]
        if kind == "int":
            return int(item["v"])
        if kind == "float":
            return float(item["v"])
        if kind == "tensor":
            data = view[offset : offset + item["bytes"]]
            offset += item["bytes"]
            return _tensor(item, data)
        if kind in ("list", "tuple"):
            out = [walk(x) for x in item["v"]]
            return out if kind == "list" else tuple(out)
        if kind == "dict":
            return {k: walk(x) for k, x in item["v"]}
        if kind == "pickle":
            return pickle.loads(base64.b64decode(item["v"]))
        raise ValueError(f"unknown item {kind!r}")

    return walk(description)


def _tensor(item: dict[str, Any], data: memoryview) -> torch.Tensor:
    dtype, shape = getattr(torch, item["dtype"]), item["shape"]
    dense = (
        _frombuffer(bytearray(data), dtype=dtype).reshape(shape) if len(data) else _empty(shape, dtype=dtype)
    )
    if item["stride"] is not None:
        span = (
            1 + sum((n - 1) * s for n, s in zip(shape, item["stride"], strict=True)) if dense.numel() else 0
        )
        strided = _as_strided(_empty(span, dtype=dtype), shape, item["stride"])
        strided.copy_(dense)
        dense = strided
    if item["parameter"]:
        return _Parameter(dense, requires_grad=item["grad"])
    return dense.requires_grad_() if item["grad"] else dense
