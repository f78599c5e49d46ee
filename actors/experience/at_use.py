"""Guidance at use: what a run's experience says of a task, for prompts to a served policy."""

import asyncio
import tempfile
from pathlib import Path

from actors.experience.experience_service import DIRECTORY, open_pool
from actors.experience.guide import QUERY_CHARS, NoAnswer
from actors.experience.own_backend import own_backend
from actors.experience.pool_file import copy_pool
from actors.formats.chat import Chat
from actors.llm.quoting import quoted_lines
from evolver_async.config import Config
from evolver_async.extension import is_own
from evolver_async.launch.run_directory import config_of
from evolver_async.model.tokenizer import load_tokenizer


def guidance(run_dir: Path, query: str) -> str:
    """Return what stands before a task in a guided episode of the run; "" if no entry is like it.

    `query`: the first message of the user, as its environment or agent words it. Raise ValueError
    if the run has no experience, or if its backend does not answer.
    """
    config = config_of(run_dir, [])
    section, query = config.experience, query[:QUERY_CHARS]
    if section.kind == "none":
        raise ValueError(f"{run_dir}: has no experience (experience.kind=none)")
    own = is_own(section.kind)
    texts = asyncio.run(_of_own(config, query)) if own else _of_pool(config, run_dir, query)
    lines = quoted_lines(texts, section.max_chars)
    if not lines:
        return ""
    chat = Chat(load_tokenizer(config.policy.path), config.rollout.template)
    return "".join(chat.experience_parts("\n".join(lines.values())))


def _of_pool(config: Config, run_dir: Path, query: str) -> list[str]:
    """Return the entries of the run's pool as it is now; the service may be writing to it."""
    section = config.experience
    with tempfile.TemporaryDirectory(prefix="evolver-experience-") as copy:
        copy_pool(run_dir / DIRECTORY, Path(copy, DIRECTORY))
        pool = open_pool(section, Path(copy))
        try:
            found = pool.retrieve(query, section.top_k, section.similarity)
        finally:
            pool.close()
    return [entry.content for entry in found]


async def _of_own(config: Config, query: str) -> list[str]:
    backend = own_backend(config)
    try:
        return (await backend.retrieve(query, "", config.experience.timeout_s)).texts
    except NoAnswer as error:
        raise ValueError(f"experience.kind: {config.experience.kind}: {error}") from error
    finally:
        await backend.close()
