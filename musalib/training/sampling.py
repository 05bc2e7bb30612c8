"""Sampling from a causal language model: batched, with a KV cache, log-probabilities and one seed per response.

Shapes: `U` distinct prompts, `B` responses still being written, `P` prompt tokens, `T` new tokens, `V` vocabulary.
Every response has its own stream of uniform numbers, derived from (seed, prompt, how many times that prompt came
before), so what it says does not depend on which other responses share its batch.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase

Messages = list[dict[str, str]]


@dataclass(frozen=True)
class Sample:
    """One response. `token_ids` holds the end token when there is one; `truncated` means that it ran into the limit.

    `logprobs` are those of the chosen tokens at the sampling temperature (temperature 1 for greedy) over the whole
    vocabulary: what the trainer computes for pi_theta, so that without drift rho is 1 for any `top_p`.
    """

    text: str
    token_ids: list[int]
    logprobs: list[float]
    truncated: bool


def stable_seed(*parts: Any) -> int:
    """A 63-bit seed from plain values; the same on every machine and in every process."""
    digest = hashlib.blake2b(json.dumps(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def encode_prompt(tokenizer: PreTrainedTokenizerBase, messages: Messages) -> list[int]:
    """Token ids of a conversation up to and including the header of the assistant's next turn."""
    return list(tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False))


def generate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    list_of_messages: Sequence[Messages],
    n: int,
    temperature: float,
    top_p: float,
    max_new_tokens: int,
    seed: int,
    batch_size: int = 256,
) -> list[list[Sample]]:
    """`n` responses to each conversation, in order. `temperature=0` is greedy."""
    keys = [json.dumps(messages) for messages in list_of_messages]
    encoded = {
        key: encode_prompt(tokenizer, m) for key, m in dict(zip(keys, list_of_messages, strict=True)).items()
    }
    prompts = [encoded[key] for key in keys for _ in range(n)]
    samples = sample_responses(
        model, tokenizer, prompts, temperature, top_p, max_new_tokens, seed, batch_size=batch_size
    )
    return [samples[i * n : (i + 1) * n] for i in range(len(list_of_messages))]


def sample_responses(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[list[int]],
    temperature: float,
    top_p: float,
    max_new_tokens: int,
    seed: int,
    batch_size: int = 256,
) -> list[Sample]:
    """One response per prompt (token ids), in order. A repeated prompt gets a new response each time.

    ValueError when the settings are out of range or prompt and response do not fit the model together.
    """
    if temperature < 0:
        raise ValueError(f"temperature must be >= 0 (0 is greedy), got {temperature}")
    if not 0 < top_p <= 1:
        raise ValueError(f"top_p must lie in (0, 1], got {top_p}")
    limit = getattr(model.config, "max_position_embeddings", None)
    longest = max(map(len, prompts), default=0)
    if limit is not None and longest + max_new_tokens > limit:
        raise ValueError(
            f"a prompt of {longest} tokens and max_new_tokens={max_new_tokens} exceed the model's {limit} positions; "
            "lower max_new_tokens or shorten the prompt"
        )
    seeds, seen = [], Counter()
    for prompt in prompts:
        key = tuple(prompt)
        seeds.append(stable_seed(seed, prompt, seen[key]))
        seen[key] += 1
    # rows of about equal length share a batch; equal prompts are neighbours and are read once
    order = sorted(range(len(prompts)), key=lambda i: (len(prompts[i]), prompts[i], i))
    samples: list[Sample | None] = [None] * len(prompts)
    was_training = model.training
    model.eval()
    try:
        for start in range(0, len(order), batch_size):
            rows = order[start : start + batch_size]
            written = _write(
                model,
                [prompts[i] for i in rows],
                [seeds[i] for i in rows],
                temperature,
                top_p,
                max_new_tokens,
                end_tokens(model, tokenizer),
                tokenizer.pad_token_id,
            )
            for i, (token_ids, logprobs, ended) in zip(rows, written, strict=True):
                text = tokenizer.decode(token_ids, skip_special_tokens=True)
                samples[i] = Sample(text, token_ids, logprobs, truncated=not ended)
    finally:
        model.train(was_training)
    return samples  # type: ignore[return-value]  # every index was visited


def end_tokens(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Ids that end a response: the tokenizer's and the model's own."""
    configured = model.generation_config.eos_token_id
    configured = [configured] if isinstance(configured, int) else list(configured or [])
    return sorted({tokenizer.eos_token_id, *configured} - {None})


@torch.inference_mode()
def _write(
    model: PreTrainedModel,
    prompts: list[list[int]],
    seeds: list[int],
    temperature: float,
    top_p: float,
    max_new_tokens: int,
    end_ids: list[int],
    pad_id: int,
) -> list[tuple[list[int], list[float], bool]]:
    """Token ids, log-probabilities and "has it ended" for each row."""
    device = model.device
    distinct = list(dict.fromkeys(map(tuple, prompts)))
    position_of = {prompt: u for u, prompt in enumerate(distinct)}
    ids_UP, mask_UP = left_pad(distinct, pad_id, device)
    cache = DynamicCache(config=model.config)
    logits = _forward(model, ids_UP, mask_UP, cache)

    row_B = torch.arange(len(prompts), device=device)
    prompt_B = torch.tensor([position_of[tuple(p)] for p in prompts], device=device)
    cache.batch_select_indices(prompt_B)
    logits_BV, mask_BP = logits[prompt_B], mask_UP[prompt_B]
    uniform = np.stack([np.random.default_rng(seed).random(max_new_tokens) for seed in seeds])
    uniform_BT = torch.from_numpy(uniform).to(device)
    end = torch.tensor(end_ids, device=device)

    tokens = torch.full((len(prompts), max_new_tokens), pad_id, dtype=torch.long, device=device)
    logprobs = torch.zeros(len(prompts), max_new_tokens, device=device)
    length = torch.full((len(prompts),), max_new_tokens, device=device)
    ended = torch.zeros(len(prompts), dtype=torch.bool, device=device)
    for t in range(max_new_tokens):
        token_B, logprob_B = choose(logits_BV, uniform_BT[row_B, t], temperature, top_p)
        running = ~ended[row_B]
        tokens[row_B, t] = torch.where(running, token_B, pad_id)
        logprobs[row_B, t] = torch.where(running, logprob_B, 0.0)
        stops = running & torch.isin(token_B, end)
        length[row_B[stops]] = t + 1
        ended[row_B[stops]] = True
        alive = ~ended[row_B]
        if t + 1 == max_new_tokens or not alive.any():
            break
        if alive.sum() <= 0.75 * len(row_B):  # fewer rows are worth the copy of the cache
            keep = alive.nonzero()[:, 0]
            cache.batch_select_indices(keep)
            row_B, mask_BP, token_B = row_B[keep], mask_BP[keep], token_B[keep]
        mask_BP = torch.cat([mask_BP, mask_BP.new_ones(len(row_B), 1)], dim=1)
        logits_BV = _forward(model, token_B[:, None], mask_BP, cache)
    lengths = length.tolist()
    return [
        (ids[:size], values[:size], done)
        for ids, values, size, done in zip(
            tokens.tolist(), logprobs.tolist(), lengths, ended.tolist(), strict=True
        )
    ]


def left_pad(rows: Sequence[Sequence[int]], pad_id: int, device: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and attention mask, [rows, longest], padded on the left."""
    width = max(map(len, rows))
    ids = torch.tensor([[pad_id] * (width - len(row)) + list(row) for row in rows], device=device)
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows], device=device)
    return ids, mask


def _forward(
    model: PreTrainedModel, ids: torch.Tensor, mask: torch.Tensor, cache: DynamicCache
) -> torch.Tensor:
    """Logits [B, V] after the last of `ids`; `mask` covers the cached tokens too."""
    position_ids = (mask.cumsum(-1) - 1).clamp(min=0)[:, -ids.shape[1] :]
    output = model(
        input_ids=ids,
        attention_mask=mask,
        position_ids=position_ids,
        past_key_values=cache,
        use_cache=True,
        logits_to_keep=1,
    )
    return output.logits[:, -1].float()


def choose(
    logits_BV: torch.Tensor, uniform_B: torch.Tensor, temperature: float, top_p: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Token and its log-probability at `temperature`, by inverting the cumulative distribution at `uniform_B`."""
    logprob_BV = torch.log_softmax(logits_BV / (temperature or 1.0), dim=-1)
    if temperature == 0:
        token_B = logits_BV.argmax(-1)
    else:
        weight_BV = logprob_BV.double().exp()
        if top_p < 1:
            weight_BV = nucleus(weight_BV, top_p)
        cumulative_BV = weight_BV.cumsum(-1)
        target = (uniform_B * cumulative_BV[:, -1])[:, None]
        # right=True: a target of 0 must not pick a first token of weight 0
        token_B = torch.searchsorted(cumulative_BV, target, right=True)[:, 0].clamp(
            max=logits_BV.shape[1] - 1
        )
    return token_B, logprob_BV.gather(1, token_B[:, None])[:, 0]


def nucleus(weight_BV: torch.Tensor, top_p: float) -> torch.Tensor:
    """Zero all but the smallest set of most likely tokens whose probabilities sum to at least `top_p`."""
    sorted_BV, index_BV = weight_BV.sort(dim=-1, descending=True)
    before_BV = sorted_BV.cumsum(-1) - sorted_BV
    sorted_BV = sorted_BV.masked_fill(before_BV >= top_p, 0.0)
    return torch.zeros_like(weight_BV).scatter_(1, index_BV, sorted_BV)
