"""What runs inside a job's sandbox: load a module, construct the model, call forward on inputs that the judge sends.

The same loop serves the reference (`role` task) and the candidate. It holds no expected output and decides nothing:
it reports raw outputs and observations, and the judge treats all of it as claims of an untrusted process.
"""

from __future__ import annotations

import contextlib
import importlib.util
import linecache
import os
import socket
import sys
import threading
import traceback
import types
from typing import Any

import torch
import torch.utils.cpp_extension

from musalib.mooreeval import codec, wire

shim: Any = None
# Bound before candidate code exists in this process; see codec.py.
_no_grad, _manual_seed, _Tensor = torch.no_grad, torch.manual_seed, torch.Tensor
_copy, _data_ptr, _exit, _listdir = torch.Tensor.copy_, torch.Tensor.data_ptr, os._exit, os.listdir
_send, _receive, _encode, _decode, _bytes = (
    wire.send,
    wire.receive,
    codec.encode,
    codec.decode,
    codec.tensor_bytes,
)


def warm_up(shim_path: str) -> None:
    """In the zygote: everything a job would otherwise pay for, without starting a thread or touching a device."""
    global shim
    sys.setdlopenflags(os.RTLD_NOW | os.RTLD_GLOBAL)  # candidates resolve the shim's functions
    spec = importlib.util.spec_from_file_location("musa_shim", shim_path)
    shim = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(shim)
    sys.setdlopenflags(os.RTLD_NOW)
    shim.trace_install()
    with torch.no_grad():
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.LayerNorm(4))
        _decode(
            *_encode([model(torch.randn(2, 4)).softmax(-1), torch.nn.functional.gelu(torch.ones(3)), 1, 2.5])
        )
    shim.trace_start()
    shim.trace_stop()


class Extension(types.ModuleType):
    """What `load_inline` returns to the candidate; counts calls, so that a decoy shows."""


class Job:
    def __init__(self, channel: socket.socket) -> None:
        self.channel = channel
        self.module: types.ModuleType | None = None
        self.model: Any = None
        self.buffers: list[Any] = []
        self.native_calls = 0
        self.sets: list[tuple[Any, bytes]] = []

    # -- loading -----------------------------------------------------------------------------------------------
    def load(self, head: dict, payload: bytes) -> None:
        source, name = payload.decode(), head["name"]
        if head["role"] == "candidate":
            torch.utils.cpp_extension.load_inline = self.load_inline
        self.module = types.ModuleType(name)
        self.module.__file__ = f"{name}.py"
        sys.modules[name] = self.module
        linecache.cache[f"{name}.py"] = (len(source), None, source.splitlines(True), f"{name}.py")
        exec(compile(source, f"{name}.py", "exec"), self.module.__dict__)
        wanted = head["defines"]
        _send(self.channel, {"event": "loaded", "found": [w for w in wanted if w in self.module.__dict__]})

    def load_inline(self, name, cpp_sources, cuda_sources=None, functions=None, extra_cflags=None, extra_ldflags=None,
                    extra_include_paths=None, is_python_module=True, with_pytorch_error_handling=True,
                    no_implicit_headers=False, **ignored):  # fmt: skip
        """Ask the judge to build; same arguments as torch's."""
        listed = lambda v: [] if v is None else [v] if isinstance(v, str) else [str(x) for x in v]  # noqa: E731
        if isinstance(functions, dict):
            functions = list(functions)
        _send(self.channel, {
            "event": "build", "name": str(name), "cpp": listed(cpp_sources), "cuda": listed(cuda_sources),
            "functions": None if functions is None else listed(functions), "cflags": listed(extra_cflags),
            "ldflags": listed(extra_ldflags), "include": listed(extra_include_paths),
            "error_handling": bool(with_pytorch_error_handling), "implicit_headers": not no_implicit_headers,
            "python_module": bool(is_python_module),
        })  # fmt: skip
        answer, image = _receive(self.channel)
        if "error" in answer:
            raise RuntimeError(f"Error building extension '{name}': {answer['error']}")
        return self.bind(str(name), answer, image)

    def bind(self, name: str, answer: dict, image: bytearray) -> types.ModuleType:
        import ctypes

        memory = os.memfd_create(name)
        os.write(memory, image) if len(image) < 1 << 30 else None
        path = f"/proc/self/fd/{memory}"
        extension = Extension(name)
        if answer["symbols"] is not None:  # light path: one C entry per function
            library = ctypes.CDLL(path)
            extension.__dict__["_library"] = library
            for function, symbol in answer["symbols"].items():
                address = ctypes.cast(getattr(library, symbol), ctypes.c_void_p).value
                setattr(extension, function, self.counted(_light_function(address)))
            return extension
        if not answer["python_module"]:
            torch.ops.load_library(path)
            return None
        from importlib.machinery import ExtensionFileLoader

        loader = ExtensionFileLoader(answer["module"], path)
        real = importlib.util.module_from_spec(importlib.util.spec_from_loader(answer["module"], loader))
        loader.exec_module(real)
        for key, value in vars(real).items():
            if not key.startswith("__"):
                setattr(
                    extension,
                    key,
                    self.counted(value) if callable(value) and not isinstance(value, type) else value,
                )
        return extension

    def counted(self, function: Any) -> Any:
        def native(*args, **kwargs):
            self.native_calls += 1
            return function(*args, **kwargs)

        return native

    # -- the reference's side ------------------------------------------------------------------------------------
    def build_reference(self, head: dict, payload: bytes) -> None:
        """Construct Model under the seed; reply what a candidate needs to start from the same weights."""
        space = self.module.__dict__
        _manual_seed(head["seed"])
        arguments = space["get_init_inputs"]()
        _manual_seed(head["seed"])
        self.model = _construct(space["Model"], arguments)
        described, data = _encode([arguments, dict(self.model.state_dict())])
        groups = len(space["get_input_groups"]()) if "get_input_groups" in space else 1
        _send(self.channel, {"event": "reference", "init": described, "groups": groups}, data)

    def reference_trial(self, head: dict, payload: bytes) -> None:
        """Inputs drawn under the seed and the outputs they give, in one payload cut at `inputs_bytes`."""
        space = self.module.__dict__
        _manual_seed(head["seed"])
        inputs = (
            space["get_input_groups"]()[head["group"]]
            if "get_input_groups" in space
            else space["get_inputs"]()
        )
        described_inputs, data = _encode(list(inputs))
        self.fill_buffers(described_inputs, data)
        outputs, report = self.forward(described_inputs, data)
        described, out = _encode(outputs, allow_pickle=False)
        _send(
            self.channel,
            {
                "event": "trial",
                "inputs": described_inputs,
                "inputs_bytes": len(data),
                "outputs": described,
                **report,
            },
            data + out,
        )

    # -- the candidate's side -------------------------------------------------------------------------------------
    def build_candidate(self, head: dict, payload: bytes) -> None:
        arguments, state = _decode(head["init"], payload)
        _manual_seed(head["seed"])
        self.model = _construct(self.module.__dict__["ModelNew"], arguments)
        own = self.model.state_dict()
        same = {k: tuple(v.shape) for k, v in own.items()} == {k: tuple(v.shape) for k, v in state.items()}
        if same and state:
            self.model.load_state_dict(state)
        _send(self.channel, {"event": "built", "weights": "state_dict" if same else "seed"})

    def trial(self, head: dict, payload: bytes) -> None:
        self.fill_buffers(head["inputs"], payload)
        outputs, report = self.forward(head["inputs"], payload)
        described, data = _encode(outputs, allow_pickle=False)
        _send(self.channel, {"event": "trial", "outputs": described, **report}, data)

    def fill_buffers(self, described: Any, payload: bytes) -> None:
        """New values in the memory that the last call's inputs had, where shapes allow: a pointer proves nothing."""
        fresh = _decode(described, payload)
        same = len(fresh) == len(self.buffers) and all(
            _same_layout(a, b) for a, b in zip(fresh, self.buffers, strict=True)
        )
        if not same:
            self.buffers = fresh
            return
        with _no_grad():
            for index, (old, new) in enumerate(zip(self.buffers, fresh, strict=True)):
                if isinstance(new, _Tensor):
                    _copy(old, new)
                else:
                    self.buffers[index] = new

    def forward(self, described: Any, payload: bytes) -> tuple[Any, dict[str, Any]]:
        calls, tasks = self.native_calls, len(_listdir("/proc/self/task"))
        with _no_grad():
            shim.trace_start()
            try:
                outputs = self.model(*self.buffers)
            finally:
                operators = shim.trace_stop()
        changed = _encode(self.buffers)[1] != bytes(payload)
        spans = [_span(t) for t in self.buffers if isinstance(t, _Tensor)]
        aliases = [_overlaps(t, spans) for t in _tensors(outputs)]
        return outputs, {
            "operators": operators, "native_calls": self.native_calls - calls, "inputs_changed": changed, "aliases": aliases,
            "threads_left": max(0, len(_listdir("/proc/self/task")) - tasks),
        }  # fmt: skip

    # -- timing -----------------------------------------------------------------------------------------------------
    def keep_inputs(self, head: dict, payload: bytes) -> None:
        """Input sets for timing, sent ahead so that a block needs no transfer."""
        self.sets.append(_decode(head["inputs"], payload))
        _send(self.channel, {"event": "kept"})

    def pin(self, head: dict, payload: bytes) -> None:
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, {head["core"]})
        _send(self.channel, {"event": "pinned"})

    def block(self, head: dict, payload: bytes) -> None:
        """Rewrite the inputs and call forward, once per entry of `order`; `forward` false leaves the calls out.

        The judge holds the clock. Afterwards it names one call whose output it wants to see.
        """
        order, model, buffers, sets, kept = head["order"], self.model, self.buffers, self.sets, []
        pairs = [
            [(b, s) for b, s in zip(buffers, chosen, strict=True) if isinstance(b, _Tensor)]
            for chosen in sets
        ]
        run, window = head["forward"], head["window"]
        with _no_grad():
            for index in order:
                for old, new in pairs[index]:
                    _copy(old, new)
                if run:
                    kept.append(model(*buffers))
                    if len(kept) > window:
                        kept.pop(0)
        _send(self.channel, {"event": "timed"})
        if run:
            wanted, _ = _receive(self.channel)
            described, data = _encode(kept[wanted["output"]], allow_pickle=False)
            _send(self.channel, {"event": "sample", "outputs": described}, data)


def _light_function(address: int) -> Any:
    call = shim.call

    def function(*args):
        return call(address, *args)

    return function


def _construct(cls: type, arguments: Any) -> Any:
    return cls(**arguments) if isinstance(arguments, dict) else cls(*arguments)


def _same_layout(a: Any, b: Any) -> bool:
    if isinstance(a, _Tensor) != isinstance(b, _Tensor):
        return False
    return not isinstance(a, _Tensor) or (
        a.shape == b.shape and a.dtype == b.dtype and a.stride() == b.stride()
    )


def _tensors(value: Any) -> list[Any]:
    if isinstance(value, _Tensor):
        return [value]
    if isinstance(value, (list, tuple)):
        return [t for item in value for t in _tensors(item)]
    if isinstance(value, dict):
        return [t for item in value.values() for t in _tensors(item)]
    return []


def _span(tensor: Any) -> tuple[int, int]:
    storage = tensor.untyped_storage()
    return storage.data_ptr(), storage.data_ptr() + storage.nbytes()


def _overlaps(tensor: Any, spans: list[tuple[int, int]]) -> bool:
    try:
        start, end = _span(tensor)
    except Exception:
        return True
    return any(start < b and a < end for a, b in spans)


COMMANDS = {
    "load": Job.load, "reference": Job.build_reference, "reference_trial": Job.reference_trial, "candidate": Job.build_candidate,
    "trial": Job.trial, "keep_inputs": Job.keep_inputs, "pin": Job.pin, "block": Job.block,
}  # fmt: skip


def serve(channel: socket.socket) -> None:
    """Answer commands until the judge closes the channel. Every Python exception is reported, none ends the loop."""
    threading.stack_size(0)
    job = Job(channel)
    while True:
        try:
            head, payload = _receive(channel)
        except wire.WireError:
            _exit(0)
        try:
            COMMANDS[head["do"]](job, head, payload)
        except wire.WireError:
            _exit(0)
        except BaseException as error:
            _send(channel, describe(error))


def describe(error: BaseException) -> dict[str, Any]:
    """Type, message and the innermost line of candidate or task code."""
    frames = [
        f for f in traceback.extract_tb(error.__traceback__) if f.filename in ("candidate.py", "task.py")
    ]
    return {
        "event": "error", "type": type(error).__name__, "message": str(error)[:4000],
        "line": frames[-1].lineno if frames else None, "code": (frames[-1].line or "")[:200] if frames else None,
        "memory": isinstance(error, MemoryError) or "can't allocate memory" in str(error),
    }  # fmt: skip
