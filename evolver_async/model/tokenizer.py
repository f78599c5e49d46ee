"""Tokenizer of a model directory, and the fingerprint by which two processes compare theirs.

This module does not import torch, so that processes without a model can compare fingerprints.
"""

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING

from evolver_async.files import parsed

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "special_tokens_map.json",
)
GENERATION = "generation_config.json"


class ModelError(ValueError):
    """A model directory or weights that cannot be used; the message names the fault."""


def load_tokenizer(directory: str | Path) -> "PreTrainedTokenizerFast":
    """Load the tokenizer of a Hugging Face directory. ModelError if it is incomplete."""
    from transformers import AutoTokenizer  # imports torch

    path = _tokenizer_json(directory)
    try:
        tokenizer = AutoTokenizer.from_pretrained(path.parent, local_files_only=True)
    except Exception as error:  # tokenizers raises no other for a file that it cannot read
        raise ModelError(f"{path} or a file beside it cannot be read: {error}") from error
    if not tokenizer.chat_template:
        raise ModelError(f"{directory} has no chat template")
    return tokenizer


def tokenizer_hash(directory: str | Path) -> str:
    """Compute a fingerprint of tokenizer, chat template and special tokens, which end turns: 32
    hexadecimal digits."""
    root, digest = _tokenizer_json(directory).parent, hashlib.blake2b(digest_size=16)
    for path in filter(Path.is_file, (root / name for name in TOKENIZER_FILES)):
        digest.update(path.read_bytes())
    digest.update(json.dumps(sorted(end_tokens(directory))).encode())
    return digest.hexdigest()


def same_tokenizer(one: str | Path, other: str | Path) -> bool:
    """Return True if the tokenizers of two directories give the same numbers to the same text.

    Their templates and what ends a turn can differ.
    """
    return _tokenizer_json(one).read_bytes() == _tokenizer_json(other).read_bytes()


def same_tokens(one: str | Path, other: str | Path) -> bool:
    """Return True if two tokenizers have the same tokens, by the same numbers. ModelError if one
    cannot be read."""
    return vocabulary_hash(one) == vocabulary_hash(other)


def vocabulary_hash(directory: str | Path) -> str:
    """Compute a fingerprint of a tokenizer's tokens by their numbers: 32 hexadecimal digits.
    ModelError if it cannot be read."""
    from tokenizers import Tokenizer

    path = _tokenizer_json(directory)
    try:
        vocabulary = Tokenizer.from_file(str(path)).get_vocab()
    except Exception as error:  # as in `load_tokenizer`
        raise ModelError(f"{path} cannot be read: {error}") from error
    known = json.dumps(sorted(vocabulary.items()), ensure_ascii=True)
    return hashlib.blake2b(known.encode(), digest_size=16).hexdigest()


def end_tokens(directory: str | Path) -> frozenset[int]:
    """Return the tokens that `generation_config.json` says a turn can end with; none without it.

    Llama 3 has three, of which its tokenizer names one. ModelError if they cannot be read.
    """
    path = Path(directory) / GENERATION
    if not path.is_file():
        return frozenset()
    try:
        found = parsed(path.read_bytes()).get("eos_token_id")
        found = found if isinstance(found, list) else [found]
        return frozenset(int(token) for token in found if token is not None)
    except (AttributeError, TypeError, ValueError) as error:
        raise ModelError(f"{path}: eos_token_id: {error}") from error


def _tokenizer_json(directory: str | Path) -> Path:
    path = Path(directory) / "tokenizer.json"
    if not path.is_file():
        raise ModelError(f"{directory} has no tokenizer.json")
    return path
