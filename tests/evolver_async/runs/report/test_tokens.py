"""Encoded tokens hold the text, roles, turns, log-probs and versions of a sequence."""

from itertools import chain
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from reported_runs import HOSTILE
from tokenizers import Tokenizer

from evolver_async.model.tiny import make_tokenizer
from evolver_async.runs.report.tokens import TokenTable
from evolver_async.schema import Role, Sequence, VersionRun, WeightId

WEIGHTS = WeightId(lineage=1, step=3)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    directory: Path = tmp_path_factory.mktemp("policy")
    make_tokenizer(64).save_pretrained(directory)
    return Tokenizer.from_file(str(directory / "tokenizer.json"))


def sequence(tokens: list[int]) -> Sequence:
    length = len(tokens)
    roles = np.full(length, Role.ACTION, np.uint8)
    roles[0] = Role.PROMPT
    versions = [VersionRun(weights=WEIGHTS, tokens=length - 1)] if length > 1 else []
    return Sequence(
        tokens=np.array(tokens, np.int32),
        roles=roles,
        turns=np.where(roles == Role.ACTION, 0, -1).astype(np.int16),
        logprobs=np.where(roles == Role.ACTION, -0.12345, 0).astype(np.float32),
        versions=versions,
    )


def texts(table: TokenTable, encoded: dict) -> list[str]:
    joined = encoded.get("o", {})
    return [joined.get(at, table.pieces[place]) for at, place in enumerate(encoded["t"])]


@given(st.text(min_size=1))
def test_any_text_is_the_same_after_encoding(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    table = TokenTable(tokenizer)
    encoded = table.encode(sequence(ids))
    assert "".join(texts(table, encoded)) == tokenizer.decode(ids, skip_special_tokens=False)


def test_runs_log_probs_and_versions_are_those_of_the_sequence(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(HOSTILE, add_special_tokens=False).ids
    table = TokenTable(tokenizer)
    encoded = table.encode(sequence(ids))
    assert encoded["r"] == [(Role.PROMPT, -1, 1), (Role.ACTION, 0, len(ids) - 1)]
    assert encoded["p"] == [-123] * (len(ids) - 1)
    assert encoded["v"] == [[0, len(ids) - 1]] and list(table.versions) == ["1.3"]


def test_equal_tokens_share_one_text(tokenizer: Tokenizer) -> None:
    table = TokenTable(tokenizer)
    encoded = [table.encode(sequence([5, 6, 5, 2000])) for _ in range(2)]
    assert encoded[0] == encoded[1]
    assert set(chain(*(one["t"] for one in encoded))) == set(range(len(table.pieces)))


def test_without_a_tokenizer_tokens_are_numbers() -> None:
    table = TokenTable(None)
    assert texts(table, table.encode(sequence([5, 6]))) == ["[5]", "[6]"]
