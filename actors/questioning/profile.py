"""Profile of an environment: its description for the language model that explores it."""

from pathlib import Path
from typing import Annotated

import msgspec

from evolver_async.config import ConfigError

MAX_BYTES = 1 << 20

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
