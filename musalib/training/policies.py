"""The tiny policy: a line-level tokenizer and a small Llama trained from scratch; and loading of any policy.

A line is the natural unit of template code: boilerplate and frequent statements are one token each, so that a
complete `ModelNew` costs tens of tokens instead of hundreds. Unseen text falls back to bytes: nothing is lost.
"""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)
from transformers.utils import logging

PAD, END, USER, ASSISTANT, SYSTEM = "<|pad|>", "<|end|>", "<|user|>", "<|assistant|>", "<|system|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}{% if message['role'] == 'assistant' %}"
    f"{ASSISTANT}{{% generation %}}{{{{ message['content'] }}}}{END}{{% endgeneration %}}"
    "{% else %}{{ '<|' + message['role'] + '|>' }}{{ message['content'] }}"
    f"{END}{{% endif %}}{{% endfor %}}{{% if add_generation_prompt %}}{ASSISTANT}{{% endif %}}"
)
LINE = r"[^\n]*\n|[^\n]+"
SAMPLE_TEXTS = 1500  # texts read when looking for blocks
MIN_LINE_COUNT = 4  # rarer lines (feedback with its numbers) are spelt out
WORD_MERGES = 224  # merges for text inside unseen lines (feedback, numbers)


class PolicyError(ValueError):
    """A policy folder is missing or damaged."""


@dataclass(frozen=True)
class TinyPolicyConfig:
    """0.8 M parameters at the defaults; `max_length` bounds prompt plus answer, in tokens."""

    hidden: int = 128
    layers: int = 3
    heads: int = 4
    ffn: int = 384
    vocab: int = 1024
    max_length: int = 512


def find_blocks(texts: Sequence[str], min_share: float = 0.03, passes: int = 12) -> list[str]:
    """Multi-line pieces that practically always occur together, longest first.

    Neighbouring pieces are merged while one of them hardly ever occurs without the other and the pair is in at
    least `min_share` of the texts, so that boilerplate becomes blocks and statements stay apart.
    """
    # a random draw: a stride would see only prompts or only answers where they alternate
    sample = random.Random(0).sample(list(texts), min(SAMPLE_TEXTS, len(texts)))
    documents = [re.findall(LINE, text) for text in sample]
    floor = max(2, min_share * len(documents))
    for _ in range(passes):
        single = Counter(piece for document in documents for piece in document)
        pairs = Counter(pair for document in documents for pair in pairwise(document))
        tied = {
            pair
            for pair, count in pairs.items()
            if count >= floor and count >= 0.995 * min(map(single.get, pair))
        }
        if not tied:
            break
        documents = [_merge(document, tied) for document in documents]
    counts = Counter(piece for document in documents for piece in document)
    return sorted(
        (p for p, n in counts.items() if p.count("\n") > 1 and n >= floor), key=lambda p: (-len(p), p)
    )


def _merge(document: list[str], tied: set[tuple[str, str]]) -> list[str]:
    merged: list[str] = []
    previous = None  # last piece as it was before this pass: a piece takes part in one merge only
    for piece in document:
        if previous is not None and (previous, piece) in tied:
            merged[-1] += piece
            previous = None
        else:
            merged.append(piece)
            previous = piece
    return merged


def build_tokenizer(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Tokenizer whose units are blocks of lines, whole lines, then byte-level BPE inside unseen lines.

    Any text round-trips exactly. Deterministic: the same texts in the same order give the same ids.
    """
    texts = list(texts)
    if not texts:
        raise ValueError("build_tokenizer needs at least one text")
    specials = [PAD, END, USER, ASSISTANT, SYSTEM]
    pattern = "|".join([*(re.escape(block) for block in find_blocks(texts)), LINE])
    pieces = Counter(piece for text in texts for piece in re.findall(pattern, text))
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(pattern), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    room = vocab_size - len(specials) - 256 - WORD_MERGES
    if room < 0:
        raise ValueError(f"vocab_size must be at least {vocab_size - room}, got {vocab_size}")
    ranked = sorted(
        (piece for piece, count in pieces.items() if count >= MIN_LINE_COUNT), key=lambda p: (-pieces[p], p)
    )
    lexicon = [_byte_text(piece) for piece in ranked[:room]]
    # merges are learnt on what the lexicon does not hold, plus each of its lines once
    rest = [
        piece
        for piece, count in sorted(pieces.items())
        for _ in range(1 if piece in ranked[:room] else count)
    ]
    vocab, merges = _word_bpe(rest, 256 + WORD_MERGES)
    for token in [*specials, *lexicon]:
        vocab.setdefault(token, len(vocab))
    # ignore_merges: a piece that is in the vocabulary as a whole is one token
    tokenizer.model = models.BPE(vocab=vocab, merges=merges, ignore_merges=True)
    tokenizer.add_special_tokens(specials)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=END,
        additional_special_tokens=[USER, ASSISTANT, SYSTEM],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        padding_side="right",
    )


def _byte_text(piece: str) -> str:
    """A piece in the byte alphabet of byte-level BPE."""
    return "".join(
        part for part, _ in pre_tokenizers.ByteLevel(False, use_regex=False).pre_tokenize_str(piece)
    )


def _word_bpe(pieces: Sequence[str], size: int) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Vocabulary and merges of an ordinary word-level byte BPE."""
    words = Tokenizer(models.BPE())
    words.pre_tokenizer = pre_tokenizers.ByteLevel(False)
    trainer = trainers.BpeTrainer(
        vocab_size=size, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    words.train_from_iterator(pieces, trainer)
    model = json.loads(words.to_str())["model"]
    return model["vocab"], [tuple(pair) for pair in model["merges"]]


def build_policy(tokenizer: PreTrainedTokenizerBase, config: TinyPolicyConfig, seed: int) -> LlamaForCausalLM:
    """A freshly initialised Llama for `tokenizer`; the same seed gives the same weights."""
    torch.manual_seed(seed)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=config.hidden,
            num_hidden_layers=config.layers,
            num_attention_heads=config.heads,
            num_key_value_heads=config.heads,
            intermediate_size=config.ffn,
            max_position_embeddings=config.max_length,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )


def save_policy(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: str | Path) -> Path:
    """Write an ordinary Hugging Face folder (config, tokenizer, safetensors)."""
    folder = Path(folder)
    logging.disable_progress_bar()  # fills notebooks and CI logs
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def load_policy(path_or_id: str | Path) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Model (float32 on a CPU, the checkpoint's dtype elsewhere) and tokenizer from a folder or a hub id.

    A pad token equal to the end token is replaced: otherwise the end of an answer would be masked as padding.
    """
    folder = Path(path_or_id)
    logging.disable_progress_bar()
    if folder.is_dir() and not (folder / "config.json").is_file():
        raise PolicyError(
            f"{folder} holds no config.json: not a policy folder (a stage's final folder is meant)"
        )
    try:
        dtype = "auto" if torch.cuda.is_available() else torch.float32
        model = AutoModelForCausalLM.from_pretrained(path_or_id, dtype=dtype)
        tokenizer = AutoTokenizer.from_pretrained(path_or_id)
    except Exception as error:  # safetensors, json and hub errors share no base class
        raise PolicyError(
            f"cannot load a policy from {path_or_id}: {type(error).__name__}: {error}. Delete the folder and rerun "
            "the stage that wrote it, or name a complete one."
        ) from error
    if tokenizer.pad_token_id is None or tokenizer.pad_token_id == tokenizer.eos_token_id:
        tokenizer.pad_token = _spare_token(tokenizer)
    model.config.pad_token_id = model.generation_config.pad_token_id = tokenizer.pad_token_id
    return model, tokenizer


def _spare_token(tokenizer: PreTrainedTokenizerBase) -> str:
    """A special token that can serve as padding without being the end token."""
    for token in ("<|pad|>", "<|endoftext|>", "<pad>", "[PAD]", tokenizer.unk_token):
        if token and token != tokenizer.eos_token and token in tokenizer.get_vocab():
            return token
    raise PolicyError(
        "the tokenizer has no pad token besides its end token; add one and resize the embeddings"
    )
