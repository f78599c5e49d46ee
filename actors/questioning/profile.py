"""Profile of an environment: its description for the language model that explores it.

It is given in a file, or the language model itself makes it of what an agent is shown first.
"""

import logging
from functools import partial
from pathlib import Path
from typing import Annotated

import msgspec

from actors.llm.json_client import (
    QUESTION_CHARS,
    TEXT_CHARS,
    JsonClient,
    as_json,
    decode_json,
    truncate,
)
from actors.questioning.actions import Surroundings
from actors.questioning.questioning_prompts import OBEYS, SUMMARY
from evolver_async.config import ConfigError
from evolver_async.config.sections.agentevolver import SUMMARISED
from evolver_async.schema import Task

MAX_BYTES = 1 << 20
SUMMARY_CHARS = 8_000  # of a profile that a language model makes

log = logging.getLogger(__name__)

Text = Annotated[str, msgspec.Meta(min_length=1)]


class Operation(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Operation on an entity."""

    name: Text
    description: str = ""


class Entity(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Kind of object in an environment. `attributes`: descriptions by name."""

    name: Text
    description: str = ""
    attributes: dict[str, str] = {}
    operations: list[Operation] = []


class ProfilePreference(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Preferred tasks: numbers of entities and operations, and the difficulty.

    Difficulty 1: operations are independent; 2: they form a chain; 3: some depend on the results of
    others.
    """

    entities: Annotated[int, msgspec.Meta(ge=1)] = 2
    operations: Annotated[int, msgspec.Meta(ge=1)] = 3
    difficulty: Annotated[int, msgspec.Meta(ge=1, le=3)] = 2


class Profile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Description of an environment and of the preferred tasks."""

    name: Text
    background: str = ""
    entities: list[Entity] = []
    preference: ProfilePreference = ProfilePreference()


RELATIONS = {
    1: "independent of each other",
    2: "in a chain: one operation prepares the next",
    3: "entangled: what one operation finds decides what the next has to be",
}


def load_profile(path: str) -> Profile:
    """Load a profile from a JSON file.

    Raise ConfigError, which names `questioning.profile`, the file and the field.
    """
    try:
        if Path(path).stat().st_size > MAX_BYTES:
            raise ConfigError(f"questioning.profile: {path} is larger than {MAX_BYTES} bytes")
        return msgspec.json.decode(Path(path).read_bytes(), type=Profile)
    except OSError as error:
        raise ConfigError(f"questioning.profile: {path}: {error.strerror}") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"questioning.profile: {path}: {error}") from None


def described(profile: Profile) -> str:
    """Describe the environment of a profile as text."""
    lines = [f"Environment: {profile.name}", profile.background]
    for entity in profile.entities:
        lines.append(f"- {entity.name}: {entity.description}")
        lines += [f"  has {name}: {what}" for name, what in entity.attributes.items()]
        lines += [f"  allows {one.name}: {one.description}" for one in entity.operations]
    wanted = profile.preference
    lines.append(
        f"A good task involves about {wanted.entities} of these and {wanted.operations} "
        f"operations, {RELATIONS[wanted.difficulty]}."
    )
    return "\n".join(line for line in lines if line)


def parse_summary(answer: str) -> Profile:
    """Parse the profile that a language model has made; preferred tasks are the usual ones. Raise
    ValueError."""
    profile = msgspec.structs.replace(decode_json(answer, Profile), preference=ProfilePreference())
    if len(text := described(profile)) > SUMMARY_CHARS:
        raise ValueError(f"a description of {len(text)} characters, at most {SUMMARY_CHARS}")
    return profile


class Profiles:
    """Profiles of environments: the user's, or one by name that a language model makes once.

    `chosen`: `questioning.profile`. Raise ConfigError if it names no profile.
    """

    def __init__(self, chosen: str, client: JsonClient | None) -> None:
        self._client = client if chosen == SUMMARISED else None
        named = bool(chosen) and chosen != SUMMARISED
        self._given = described(load_profile(chosen)) if named else ""
        self._made: dict[str, str] = {}
        self._asking: set[str] = set()

    def of(self, env: str) -> str:
        """Return the profile of an environment as text; "" if there is none (yet)."""
        return self._given or self._made.get(env, "")

    async def describe(self, met: Surroundings) -> str:
        """Return the profile of an environment, made if need be, and its tools. Raise Unavailable.

        Its instructions take the place of a profile that there is not. Explorations that begin
        while another one has it made do not wait: each question may take as long as a ticket may
        make no progress.
        """
        if self._client is not None and met.env not in {*self._made, *self._asking}:
            self._asking.add(met.env)
            try:
                self._made[met.env] = await self._summary(self._client, met)
            finally:
                self._asking.remove(met.env)
        return met.form.with_tools(self.of(met.env) or met.instructions)

    async def _summary(self, client: JsonClient, met: Surroundings) -> str:
        """Return the model's profile; "" if it gives none that can be read."""
        record = {
            "instructions": met.instructions[:QUESTION_CHARS],
            "tools": list(met.form.tools),
            "beginning": met.beginning[:TEXT_CHARS],
        }
        profile = await client.ask(SUMMARY, as_json(record), parse_summary)
        if profile is None:
            log.warning("no profile of %s: its instructions describe it", met.env)
        return "" if profile is None else described(profile)


class ProfileAnswer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Answer of a language model that compares a task with a profile."""

    obeys: bool


async def obeys(client: JsonClient, profile: str, task: Task) -> bool:
    """Return True if a language model finds that a task obeys the profile; False also without a
    readable answer. Raise Unavailable."""
    record = {"task": task.query, "reference": truncate(task.reference or [])}
    question = f"{profile}\n\n{as_json(record)}"
    found = await client.ask(OBEYS, question, partial(decode_json, kind=ProfileAnswer))
    return found is not None and found.obeys
