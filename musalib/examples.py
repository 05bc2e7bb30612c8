"""One small task and candidates that fail in different ways, for the notebook about the verifier and for trying it."""

from musalib.tasks import Task

TASK = Task(
    id="scaled_relu",
    source="""\
import torch
import torch.nn as nn


class Model(nn.Module):
    def forward(self, x):
        return torch.relu(x) * 2.0


def get_inputs():
    return [torch.randn(16, 64)]


def get_init_inputs():
    return []
""",
)

MODULE = '''\
import torch
import torch.nn as nn
from torch.utils.cpp_extension import load_inline

cpp_source = r"""
torch::Tensor scaled_relu(torch::Tensor x) {
BODY
}
"""

ext = load_inline(name="scaled_relu", cpp_sources=cpp_source, functions=["scaled_relu"])


class ModelNew(nn.Module):
    def forward(self, x):
        return ext.scaled_relu(x)
'''

LOOP = """\
    auto out = torch::empty_like(x);
    const float* a = x.data_ptr<float>();
    float* b = out.data_ptr<float>();
    for (int64_t i = 0; i < x.numel(); ++i)
        b[i] = a[i] > 0.0f ? 2.0f * a[i] : 0.0f;
    return out;"""


def candidate(body: str) -> str:
    return MODULE.replace("BODY", body)


CANDIDATES = {
    "native loop": candidate(LOOP),
    "forgets the factor": candidate(LOOP.replace("2.0f * a[i]", "a[i]")),
    "returns the wrong shape": candidate(LOOP.replace("return out;", "return out.view({64, 16});")),
    "missing semicolon": candidate(LOOP.replace("return out;", "return out")),
    "writes far out of bounds": candidate(LOOP.replace("b[i] =", "b[i + 4000000000] =")),
    "calls ATen inside C++": candidate("    return at::relu(x) * 2.0;"),
    "calls PyTorch in forward": candidate(LOOP).replace("ext.scaled_relu(x)", "torch.relu(x) * 2.0"),
    "no ModelNew at all": "I would fuse the two operators into one loop.",
}
