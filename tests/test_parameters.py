"""A notebook parameter that is misspelt or mistyped stops at once and names its neighbour."""

from dataclasses import dataclass, field

import pytest

from musalib.parameters import ParameterError, parse_assignments, read_parameters
from musalib.profiles import PROFILES, get_profile, resolve


@dataclass(frozen=True)
class Example:
    run: str
    seed: int = 0
    learning_rate: float = 1e-6
    resume: bool = True
    steps: int | None = None
    levels: list = field(default_factory=list)


def test_reads_typed_values_and_keeps_defaults():
    config = read_parameters({"run": "demo", "seed": 3, "steps": None}, Example)
    assert config == Example("demo", seed=3)


def test_text_becomes_a_number_where_yaml_leaves_it_as_text():
    config = read_parameters({"run": "demo", "learning_rate": "1e-5", "steps": "12"}, Example)
    assert config.learning_rate == 1e-5 and config.steps == 12


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"run": "a", "learnig_rate": 1.0}, "did you mean 'learning_rate'"),
        ({"run": "a", "zzz": 1}, "known: learning_rate"),
        ({"run": "a", "resume": "true"}, "True or False without quotes"),
        ({"run": "a", "seed": 1.5}, "'seed' must be int"),
        ({"run": "a", "seed": True}, "'seed' must be int"),
        ({"run": "a", "learning_rate": "fast"}, "'learning_rate' must be float"),
        ({"run": "a", "learning_rate": float("nan")}, "'learning_rate' must be float"),
        ({"run": 7}, "'run' must be str"),
        ({"run": "a", "levels": "1,2"}, "'levels' must be list"),
        ({"run": "a", "steps": "many"}, "'steps' must be int or None"),
        ({}, "'run' is missing"),
    ],
)
def test_wrong_parameters_stop_with_advice(values, message):
    with pytest.raises(ParameterError, match=message):
        read_parameters(values, Example)


def test_in_a_notebook_only_what_was_written_as_a_parameter_counts():
    namespace = {
        "In": [
            "",
            'run: str = "demo"\nseed: int = 0',
            "# Parameters\nseed = 5\n",
            "total = 7\n%matplotlib inline",
        ],
        "run": "demo",
        "seed": 5,
        "total": 7,
        "_": None,
    }
    assert read_parameters(namespace, Example) == Example("demo", seed=5)
    namespace |= {"In": [*namespace["In"], "# Parameters\nsede = 1\n"], "sede": 1}
    with pytest.raises(ParameterError, match="'sede'; did you mean 'seed'"):
        read_parameters(namespace, Example)


def test_assignments_on_the_command_line():
    given = parse_assignments(["a=3", "b=1e-6", "c=True", "d=true", "e=[1, 2]", "f=x=y", "g="])
    assert given == {"a": 3, "b": 1e-6, "c": True, "d": "true", "e": [1, 2], "f": "x=y", "g": ""}
    for broken in (["a"], ["=3"], ["a b=3"], ["a=1", "a=2"]):
        with pytest.raises(ParameterError):
            parse_assignments(broken)


def test_profiles_differ_in_values_only_and_the_unavailable_say_so():
    assert list(PROFILES) == ["smoke", "tiny", "smol", "9b", "27b"]
    assert resolve("smoke", {"rl_steps": 7, "sft_steps": None, "run": "x"}).rl_steps == 7
    assert resolve("smoke", {"sft_steps": None}) == get_profile("smoke")
    with pytest.raises(ParameterError, match="did you mean 'tiny'"):
        get_profile("tinny")
    with pytest.raises(ParameterError, match="not available here yet"):
        get_profile("9b")
