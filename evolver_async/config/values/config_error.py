"""The error of a configuration, which never shows a value that came from the environment."""

import re

from evolver_async.errors import Unrecoverable

# Reference to an environment variable, such as ${oc.env:NAME}, by each text of its value.
references: dict[str, str] = {}


class ConfigError(Unrecoverable, ValueError):
    """One sentence that names the key or file, the problem and what is allowed.

    A value that the configuration took from the environment is shown as its reference.
    """

    def __str__(self) -> str:
        if not references:
            return super().__str__()
        forms = sorted(references, key=len, reverse=True)
        # A short value is replaced only where it is a whole word.
        whole = (re.escape(f) if len(f) >= 8 else rf"(?<!\w){re.escape(f)}(?!\w)" for f in forms)
        return re.sub("|".join(whole), lambda found: references[found[0]], super().__str__())
