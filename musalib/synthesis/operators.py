"""The operators of synthetic tasks: a PyTorch expression, correct C++ lines and the mistakes models make.

The base policy stands in for a pretrained model whose kernel knowledge is unreliable: in its corpus every
operator is written wrongly with the share `wrong_share`, always by a mistake seen in real candidates (min for
max, a missing sign, `0.0` for `0.0f` in std::max, CUDA intrinsics on a CPU, a function that does not exist).
Lines act on the float `v` (and `u`, the element of a second input). `wrong_share_table()` prints the shares.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Operator:
    """`expression` computes the new `x` in PyTorch; `right` and `wrong` are alternative C++ texts.

    `kind` is "unary", "binary" (reads the second input `y`), "tail" (works on rows, ends the program) or
    "matmul" (starts it). `rare` marks operators whose right form is almost absent from the base corpus and
    that the SFT corpus leaves out, so that discovery can be told from re-weighting.
    """

    name: str
    expression: str
    right: tuple[str, ...]
    wrong: tuple[str, ...]
    wrong_share: float
    kind: str = "unary"
    rare: bool = False

    def __post_init__(self) -> None:
        if not 0.0 <= self.wrong_share < 1.0:
            raise ValueError(f"{self.name}: wrong_share must lie in [0, 1), got {self.wrong_share}")
        if set(self.right) & set(self.wrong):
            raise ValueError(f"{self.name}: a line cannot be both right and wrong")


def _pointwise(
    name: str, expression: str, share: float, right: list[str], wrong: list[str], **more
) -> Operator:
    def statements(bodies: list[str]) -> tuple[str, ...]:
        return tuple(body if body.startswith("if ") else f"v = {body};" for body in bodies)

    return Operator(name, expression, statements(right), statements(wrong), share, **more)


# fmt: off
POINTWISE = [
    _pointwise("relu", "torch.relu(x)", 0.35,
               ["std::max(v, 0.0f)", "v > 0.0f ? v : 0.0f", "if (v < 0.0f) v = 0.0f;"],
               ["std::min(v, 0.0f)", "std::max(v, 0.0)", "relu(v)"]),
    _pointwise("leaky_relu", "F.leaky_relu(x, 0.1)", 0.5,
               ["v > 0.0f ? v : 0.1f * v", "std::max(v, 0.1f * v)", "if (v < 0.0f) v *= 0.1f;"],
               ["v > 0.0f ? v : 0.01f * v", "std::max(v, 0.1 * v)", "v < 0.0f ? v : 0.1f * v"]),
    _pointwise("sigmoid", "torch.sigmoid(x)", 0.55,
               ["1.0f / (1.0f + std::exp(-v))", "0.5f * (1.0f + std::tanh(0.5f * v))"],
               ["1.0f / (1.0f + std::exp(v))", "1.0f / (1.0f + __expf(-v))", "sigmoid(v)"]),
    _pointwise("tanh", "torch.tanh(x)", 0.4,
               ["std::tanh(v)", "1.0f - 2.0f / (std::exp(2.0f * v) + 1.0f)"],
               ["1.0f - 2.0f / (std::exp(v) + 1.0f)", "tanh_approx(v)", "std::sinh(v)"]),
    _pointwise("exp", "torch.exp(x)", 0.4,
               ["std::exp(v)", "expf(v)"],
               ["__expf(v)", "std::exp2(v)", "std::exp(-v)"]),
    _pointwise("silu", "F.silu(x)", 0.6,
               ["v / (1.0f + std::exp(-v))", "v * (1.0f / (1.0f + std::exp(-v)))"],
               ["v / (1.0f + std::exp(v))", "1.0f / (1.0f + std::exp(-v))", "v * sigmoid(v)"]),
    _pointwise("softplus", "F.softplus(x)", 0.6,
               ["v > 20.0f ? v : std::log1p(std::exp(v))",
                "std::max(v, 0.0f) + std::log1p(std::exp(-std::abs(v)))"],
               ["std::log(std::exp(v))", "std::log1p(std::exp(-v))", "log1p_exp(v)"]),
    _pointwise("gelu", "F.gelu(x)", 0.6,
               ["0.5f * v * (1.0f + std::erf(v * 0.70710678f))",
                "v * 0.5f * std::erfc(-v * 0.70710678f)"],
               ["0.5f * v * (1.0f + std::erf(v))", "v * std::erf(v * 0.70710678f)", "gelu(v)"]),
    _pointwise("abs", "torch.abs(x)", 0.3,
               ["std::abs(v)", "std::fabs(v)", "if (v < 0.0f) v = -v;"],
               ["v > 0.0f ? -v : v", "std::max(v, 0.0f) + std::min(v, 0.0f)", "absolute(v)"]),
    _pointwise("neg", "-x", 0.3,
               ["-v", "0.0f - v", "-1.0f * v"],
               ["1.0f - v", "std::negate(v)", "v > 0.0f ? -v : v"]),
    _pointwise("square", "torch.square(x)", 0.35,
               ["v * v", "std::pow(v, 2.0f)"],
               ["v ^ 2", "2.0f * v", "std::pow(2.0f, v)"]),
    _pointwise("sqrt_abs", "torch.sqrt(torch.abs(x))", 0.5,
               ["std::sqrt(std::abs(v))", "std::pow(std::fabs(v), 0.5f)"],
               ["std::sqrt(v)", "std::abs(std::sqrt(v))", "1.0f / std::sqrt(std::abs(v))"]),
    _pointwise("log1p_abs", "torch.log1p(torch.abs(x))", 0.5,
               ["std::log1p(std::abs(v))", "std::log(1.0f + std::fabs(v))"],
               ["std::log(std::abs(v))", "std::log2(1.0f + std::abs(v))", "log1p_abs(v)"]),
    _pointwise("sin", "torch.sin(x)", 0.35,
               ["std::sin(v)", "sinf(v)"],
               ["std::sinh(v)", "v - v * v * v / 6.0f", "std::cos(v)"]),
    _pointwise("cos", "torch.cos(x)", 0.35,
               ["std::cos(v)", "cosf(v)"],
               ["std::cosh(v)", "1.0f - 0.5f * v * v", "std::sin(v)"]),
    _pointwise("clamp", "torch.clamp(x, -1.0, 1.0)", 0.5,
               ["std::min(std::max(v, -1.0f), 1.0f)", "std::clamp(v, -1.0f, 1.0f)"],
               ["std::max(std::min(v, -1.0f), 1.0f)", "std::clamp(v, -1, 1)", "std::max(v, 1.0f)"]),
    _pointwise("elu", "F.elu(x)", 0.55,
               ["v > 0.0f ? v : std::expm1(v)", "v > 0.0f ? v : std::exp(v) - 1.0f"],
               ["v > 0.0f ? v : std::exp(v)", "v > 0.0f ? v : 1.0f - std::exp(v)", "v > 0.0f ? v : v * std::exp(v)"]),
    _pointwise("softsign", "F.softsign(x)", 0.5,
               ["v / (1.0f + std::abs(v))", "v / (1.0f + std::fabs(v))"],
               ["v / (1.0f + v * v)", "1.0f / (1.0f + std::abs(v))", "v / 1.0f + std::abs(v)"]),
    _pointwise("add_half", "x + 0.5", 0.3,
               ["v + 0.5f", "0.5f + v"],
               ["v - 0.5f", "v + 5.0f", "v + 1 / 2"]),
    _pointwise("mul_two", "x * 2.0", 0.3,
               ["v * 2.0f", "v + v"],
               ["v << 1", "v * v", "std::pow(v, 2.0f)"]),
    _pointwise("div_three", "x / 3.0", 0.4,
               ["v / 3.0f", "v * (1.0f / 3.0f)"],
               ["v * (1 / 3)", "v / 0.3f", "3.0f / v"]),
    _pointwise("one_minus", "1.0 - x", 0.4,
               ["1.0f - v", "-v + 1.0f"],
               ["v - 1.0f", "-1.0f - v", "1.0f + v"]),
    _pointwise("add_y", "x + y", 0.3, ["v + u", "u + v"], ["v + y", "v * u", "u"], kind="binary"),
    _pointwise("sub_y", "x - y", 0.4, ["v - u", "-(u - v)"], ["u - v", "v - y", "v + u"], kind="binary"),
    _pointwise("mul_y", "x * y", 0.3, ["v * u", "u * v"], ["v + u", "v * y", "std::pow(v, u)"], kind="binary"),
    _pointwise("max_y", "torch.maximum(x, y)", 0.5, ["std::max(v, u)", "v > u ? v : u"],
               ["std::min(v, u)", "std::max(v, y)", "v < u ? v : u"], kind="binary"),
    # right in 4 of 100 lines: these two can only be found, not re-weighted from an already likely form
    _pointwise("mish", "F.mish(x)", 0.96,
               ["v * std::tanh(std::log1p(std::exp(v)))"],
               ["v * std::tanh(std::exp(v))", "v * std::log1p(std::exp(v))", "v * std::tanh(v)"], rare=True),
    _pointwise("hardswish", "F.hardswish(x)", 0.96,
               ["v * std::min(std::max(v + 3.0f, 0.0f), 6.0f) / 6.0f"],
               ["v * std::min(std::max(v + 3.0f, 0.0f), 6.0f)", "v * std::min(std::max(v, 0.0f), 6.0f) / 6.0f",
                "std::min(std::max(v + 3.0f, 0.0f), 6.0f) / 6.0f"], rare=True),
]
# fmt: on

MATMUL_RIGHT = (
    """\
    for (int64_t i = 0; i < rows; ++i)
    for (int64_t j = 0; j < cols; ++j) {
        float acc = 0.0f;
        for (int64_t k = 0; k < inner; ++k) acc += x_ptr[i * inner + k] * w_ptr[k * cols + j];
        b[i * cols + j] = acc;
    }
""",
    """\
    std::fill(b, b + rows * cols, 0.0f);
    for (int64_t i = 0; i < rows; ++i)
    for (int64_t k = 0; k < inner; ++k) {
        const float left = x_ptr[i * inner + k];
        for (int64_t j = 0; j < cols; ++j) b[i * cols + j] += left * w_ptr[k * cols + j];
    }
""",
)

REDUCE = """\
    auto out = torch::empty({{rows}});
    float* o = out.data_ptr<float>();
    for (int64_t r = 0; r < rows; ++r) {{
        {start}
        for (int64_t c = 0; c < cols; ++c) {step}
        {store}
    }}
    return out;
"""

NORMALISE = """\
    for (int64_t r = 0; r < rows; ++r) {{
        float* row = b + r * cols;
{body}\
    }}
    return buf;
"""


def _reduce(start: str, step: str, store: str) -> str:
    return REDUCE.format(start=start, step=step, store=store)


def _normalise(*lines: str) -> str:
    return NORMALISE.format(body="".join(f"        {line}\n" for line in lines))


ADD, EACH = "acc += b[r * cols + c];", "for (int64_t c = 0; c < cols; ++c)"
ZERO, DOUBLE = "float acc = 0.0f;", "double acc = 0.0;"
PEAK = ("float top = row[0];", f"{EACH} top = std::max(top, row[c]);")
SHIFTED = ("float acc = 0.0f;", f"{EACH} acc += row[c] = std::exp(row[c] - top);")
MEAN = ("float mean = 0.0f, var = 0.0f;", f"{EACH} mean += row[c] / cols;")
VAR = f"{EACH} var += (row[c] - mean) * (row[c] - mean) / cols;"
POWER = ("float power = 0.0f;", f"{EACH} power += row[c] * row[c];")
SCALE_LN = f"{EACH} row[c] = (row[c] - mean) / std::sqrt(var + 1e-5f);"
SCALE_RMS = f"{EACH} row[c] /= std::sqrt(power / cols + 1e-5f);"

BLOCKS = [
    Operator(
        "matmul",
        "x @ w",
        MATMUL_RIGHT,
        (
            MATMUL_RIGHT[0].replace("w_ptr[k * cols + j]", "w_ptr[j * inner + k]"),
            MATMUL_RIGHT[0].replace("acc += x_ptr", "acc = x_ptr"),
            MATMUL_RIGHT[0].replace("acc += ", "acc += x_ptr[i] * "),
        ),
        0.4,
        kind="matmul",
    ),
    Operator(
        "sum",
        "x.sum(dim=-1)",
        (_reduce(ZERO, ADD, "o[r] = acc;"), _reduce(DOUBLE, ADD, "o[r] = static_cast<float>(acc);")),
        (
            _reduce(ZERO, ADD, "o[r] = acc / cols;"),
            _reduce(ZERO, ADD.replace("+=", "="), "o[r] = acc;"),
            _reduce("", ADD, "o[r] = acc;"),
        ),
        0.4,
        kind="tail",
    ),
    Operator(
        "mean",
        "x.mean(dim=-1)",
        (
            _reduce(ZERO, ADD, "o[r] = acc / cols;"),
            _reduce(DOUBLE, ADD, "o[r] = static_cast<float>(acc / cols);"),
        ),
        (
            _reduce(ZERO, ADD, "o[r] = acc;"),
            _reduce(ZERO, ADD, "o[r] = acc / rows;"),
            _reduce("int acc = 0;", ADD, "o[r] = acc / cols;"),
        ),
        0.45,
        kind="tail",
    ),
    Operator(
        "amax",
        "x.amax(dim=-1)",
        (
            _reduce("float acc = b[r * cols];", "acc = std::max(acc, b[r * cols + c]);", "o[r] = acc;"),
            _reduce(
                "float acc = -INFINITY;", "if (b[r * cols + c] > acc) acc = b[r * cols + c];", "o[r] = acc;"
            ),
        ),
        (
            _reduce("float acc = b[r * cols];", "acc = std::min(acc, b[r * cols + c]);", "o[r] = acc;"),
            _reduce("float acc = b[r * cols];", "acc = std::max(acc, b[c]);", "o[r] = acc;"),
            _reduce("float acc = -INFINITY;", "acc = max(acc, b[r * cols + c]);", "o[r] = acc;"),
        ),
        0.45,
        kind="tail",
    ),
    Operator(
        "softmax",
        "torch.softmax(x, dim=-1)",
        (
            _normalise(*PEAK, *SHIFTED, f"{EACH} row[c] /= acc;"),
            # no maximum subtracted: right for the magnitudes of these tasks, and common
            _normalise(ZERO, f"{EACH} acc += std::exp(row[c]);", f"{EACH} row[c] = std::exp(row[c]) / acc;"),
        ),
        (
            _normalise(*PEAK, *SHIFTED),
            _normalise(ZERO, f"{EACH} acc += row[c];", f"{EACH} row[c] = std::exp(row[c]) / acc;"),
            _normalise(
                *PEAK,
                ZERO,
                f"{EACH} acc += std::exp(row[c] - top);",
                f"{EACH} row[c] = std::exp(row[c]) / acc;",
            ),
        ),
        0.5,
        kind="tail",
    ),
    Operator(
        "rms_norm",
        "x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + 1e-5)",
        (
            _normalise(*POWER, SCALE_RMS),
            _normalise(
                *POWER,
                "const float scale = 1.0f / std::sqrt(power / cols + 1e-5f);",
                f"{EACH} row[c] *= scale;",
            ),
        ),
        (
            _normalise(*POWER, f"{EACH} row[c] /= std::sqrt(power + 1e-5f);"),
            _normalise(*POWER, f"{EACH} row[c] /= power / cols + 1e-5f;"),
            _normalise(*POWER, f"{EACH} row[c] *= rsqrtf(power / cols + 1e-5f);"),
        ),
        0.5,
        kind="tail",
    ),
    Operator(
        "layer_norm",
        "F.layer_norm(x, x.shape[-1:])",
        (
            _normalise(*MEAN, VAR, SCALE_LN),
            _normalise(
                *MEAN,
                VAR,
                "const float scale = 1.0f / std::sqrt(var + 1e-5f);",
                f"{EACH} row[c] = (row[c] - mean) * scale;",
            ),
        ),
        (
            _normalise(*MEAN, VAR, f"{EACH} row[c] = row[c] / std::sqrt(var + 1e-5f) - mean;"),
            _normalise(*MEAN, VAR.replace("/ cols", "/ (cols - 1)"), SCALE_LN),
            _normalise(*MEAN, VAR, f"{EACH} row[c] = (row[c] - mean) / (var + 1e-5f);"),
        ),
        0.55,
        kind="tail",
    ),
]

OPERATORS: dict[str, Operator] = {operator.name: operator for operator in [*POINTWISE, *BLOCKS]}


def names(kind: str) -> tuple[str, ...]:
    """Operators of one kind, in table order."""
    return tuple(name for name, operator in OPERATORS.items() if operator.kind == kind)


def wrong_share_table() -> str:
    """Markdown table of the share of wrong lines each operator has in the base corpus."""
    rows = [
        "| operator | PyTorch | right forms | wrong forms | wrong share |",
        "| --- | --- | --- | --- | --- |",
    ]
    for name, operator in OPERATORS.items():
        label = f"{name} (rare)" if operator.rare else name
        counts = f"{len(operator.right)} | {len(operator.wrong)}"
        rows.append(f"| {label} | `{operator.expression}` | {counts} | {100 * operator.wrong_share:.0f} % |")
    return "\n".join(rows)
