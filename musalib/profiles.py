"""Profiles: sizes and policy of a run, nothing else. The code path is the same for every one of them."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from musalib.parameters import ParameterError, nearest


@dataclass(frozen=True)
class Profile:
    """Everything a run's size depends on. `*_steps` are optimiser steps, `*_batch` sequences per step.

    The defaults are the `tiny` profile; learning rates and shares are for its small Llama.
    """

    name: str
    missing: str = ""  # what keeps this profile from running here; empty when it runs
    policy: str = "tiny"  # "tiny" (trained from scratch) or a Hugging Face id
    backend: str = "cpu"
    publish: bool = True  # copy table and figure to figures/ at the end
    threads: int = (
        1  # of torch: a tiny model gains nothing from more, and one gives the same numbers everywhere
    )

    # the tiny policy (ignored for any other)
    hidden: int = 128
    layers: int = 3
    heads: int = 4
    feed_forward: int = 384
    vocabulary: int = 1024
    max_length: int = 512
    max_new_tokens: int = 96

    # unreliable base corpus and the base policy trained on it
    base_samples: int = 6000
    base_dialogues: int = 400
    base_checked: int = 100
    base_steps: int = 1200
    base_batch: int = 32
    base_learning_rate: float = 3e-3

    # verified corpus and SFT
    sft_samples: int = 560
    sft_steps: int = 60
    sft_batch: int = 16
    sft_learning_rate: float = 2e-4

    # rejection sampling and RFT: light on purpose, so that RL has something left to do
    rft_tasks: int = 110
    rft_samples: int = 16
    rft_steps: int = 60
    rft_batch: int = 16
    rft_learning_rate: float = 2e-4

    # single-turn RL: `rl_prompts` groups of `rl_group` responses a step
    rl_tasks: int = 1500
    rl_prompts: int = 8
    rl_group: int = 16
    rl_steps: int = 50
    rl_learning_rate: float = 5e-4

    # multi-turn RL
    multi_prompts: int = 8
    multi_group: int = 8
    multi_steps: int = 45
    multi_turns: int = 3
    multi_learning_rate: float = 5e-4

    # stabilisers; alpha is the paper's, the rest is undisclosed there and chosen here
    alpha: float = 0.75
    retry_share: float = 0.1
    retry_capacity: int = 256
    mirror_pop_delta: float = 0.3

    # evaluation on the final set; the tuning set is for whoever changes the recipe
    tune_tasks: int = 100
    eval_tasks: int = 120
    eval_samples: int = 8
    eval_repairs: int = 2  # of these, answers that may be repaired
    eval_turns: int = 3

    # the verifier
    trials: int = 3
    timing_pairs: int = 5


PROFILES = {
    profile.name: profile
    for profile in (
        Profile(
            "smoke",
            publish=False,
            base_samples=2000,
            base_dialogues=20,
            base_checked=10,
            base_steps=400,
            base_batch=16,
            sft_samples=80,
            sft_steps=40,
            sft_learning_rate=1e-3,
            rft_tasks=24,
            rft_samples=8,
            rft_steps=10,
            rl_tasks=40,
            rl_prompts=2,
            rl_group=4,
            rl_steps=2,
            multi_prompts=2,
            multi_group=4,
            multi_steps=2,
            tune_tasks=6,
            eval_tasks=6,
            eval_samples=4,
            eval_repairs=1,
            trials=2,
            timing_pairs=2,
        ),
        Profile("tiny"),
        Profile(
            "smol",
            missing="its prompts and the cuda backend",
            policy="HuggingFaceTB/SmolLM2-135M-Instruct",
            backend="cuda",
            threads=8,
            max_length=4096,
            max_new_tokens=2048,
            publish=False,
        ),
        Profile(
            "9b",
            missing="the cluster launcher",
            policy="Qwen/Qwen3.5-9B",
            backend="cuda",
            threads=8,
            max_length=32768,
            max_new_tokens=16384,
            publish=False,
        ),
        Profile(
            "27b",
            missing="the cluster launcher",
            policy="Qwen/Qwen3.6-27B",
            backend="cuda",
            threads=8,
            max_length=32768,
            max_new_tokens=16384,
            publish=False,
        ),
    )
}


def get_profile(name: str) -> Profile:
    """The profile called `name`; ParameterError when it is unknown or not available here yet."""
    if name not in PROFILES:
        raise ParameterError(f"unknown profile {name!r}{nearest(name, PROFILES)}")
    profile = PROFILES[name]
    if profile.missing:
        ready = ", ".join(n for n, p in PROFILES.items() if not p.missing)
        raise ParameterError(
            f"profile {name!r} is not available here yet ({profile.missing}); available: {ready}"
        )
    return profile


def resolve(name: str, overrides: dict[str, Any]) -> Profile:
    """The profile with every override that is not None put in its place (None: keep the profile's value)."""
    known = {f.name for f in dataclasses.fields(Profile)}
    changes = {field: value for field, value in overrides.items() if field in known and value is not None}
    return dataclasses.replace(get_profile(name), **changes)


def sizes(profile: Profile, *prefixes: str) -> dict[str, Any]:
    """The entries of a profile whose names start with one of `prefixes`, for a notebook to show."""
    values = dataclasses.asdict(profile)
    return {name: value for name, value in values.items() if name.startswith(prefixes)}
