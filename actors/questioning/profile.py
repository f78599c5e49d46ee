"""What an environment is, in words: the profile that a language model explores and asks with."""

from pathlib import Path
from typing import Annotated

import msgspec

from evolver_async.config import ConfigError

MOST_BYTES = 1 << 20

Text = Annotated[str, msgspec.Meta(min_length=1)]


class Operation(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Something that can be done with an entity."""

    name: Text
    description: str = ""


class Entity(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Something that there is. `attributes`: what each is, by its name."""

    name: Text
    description: str = ""
    attributes: dict[str, str] = {}
    operations: list[Operation] = []


class Preference(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What tasks are wanted: how many entities and operations one involves, and how they hang
    together (1: each by itself, 2: in a chain, 3: some depend on what others find)."""

    entities: Annotated[int, msgspec.Meta(ge=1)] = 2
    operations: Annotated[int, msgspec.Meta(ge=1)] = 3
    difficulty: Annotated[int, msgspec.Meta(ge=1, le=3)] = 2


class Profile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An environment, and the tasks that are wanted of it."""

    name: Text
    background: str = ""
    entities: list[Entity] = []
    preference: Preference = Preference()


RELATIONS = {
    1: "independent of each other",
    2: "in a chain: one operation prepares the next",
    3: "entangled: what one operation finds decides what the next has to be",
}


def load_profile(path: str) -> Profile:
    """The profile in a JSON file. ConfigError names `questioning.profile`, the file and the
    field."""
    try:
        if Path(path).stat().st_size > MOST_BYTES:
            raise ConfigError(f"questioning.profile: {path} is larger than {MOST_BYTES} bytes")
        return msgspec.json.decode(Path(path).read_bytes(), type=Profile)
    except OSError as error:
        raise ConfigError(f"questioning.profile: {path}: {error.strerror}") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"questioning.profile: {path}: {error}") from None


def described(profile: Profile) -> str:
    """The profile as text."""
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
