"""Questions of the code environment, and the check of their answers."""

import json
import re
from fractions import Fraction
from typing import Any, NamedTuple

_NUMBER = re.compile(r"([+-]?(?=\.?\d)\d{0,60})(?:\.(\d{0,60}))?(?:/(\d{1,60}))?")
HARNESS = """

import json
__answers = []
for __case in json.loads({cases!r}):
    try:
        __answers.append(json.dumps({function}(*__case), sort_keys=True))
    except Exception as __error:
        __answers.append(None)
print()
print(json.dumps(__answers))
"""


class Problem(NamedTuple):
    """A question. Its answer is `answer`, or a program whose `function` passes the hidden `tests`:
    pairs of arguments and result.

    For demonstrations: `program` is worth running first, `solution` is a right answer, `wrong` are
    answers that are not, `broken` programs that end in an error.
    """

    question: str
    answer: str = ""
    tests: tuple[tuple[list[Any], Any], ...] = ()
    function: str = "f"
    program: str = ""
    solution: str = ""
    wrong: tuple[str, ...] = ()
    broken: tuple[str, ...] = ()

    def examination(self, answer: str) -> str:
        """Return the program that runs an answer on the hidden tests. It holds no expected result:
        results are compared outside, where no program can read them."""
        cases = json.dumps([arguments for arguments, _ in self.tests])
        return answer + HARNESS.format(cases=cases, function=self.function)

    def passed(self, stdout: str) -> bool:
        """Return True if every test passed, according to the output of the examination."""
        last = stdout.rstrip("\n").rpartition("\n")[2]
        return last == json.dumps([json.dumps(result, sort_keys=True) for _, result in self.tests])


def same(text: str, answer: str) -> bool:
    """Return True if an answer is right: as a number if both are numbers, otherwise as text."""
    given, wanted = number(text), number(answer)
    if given is not None and wanted is not None:
        return given == wanted
    return " ".join(text.split()).lower() == " ".join(answer.split()).lower()


def number(text: str) -> Fraction | None:
    """Parse `12`, `-1.50`, `.5`, `5.`, `3/4` or `1,000`; None for other text."""
    found = _NUMBER.fullmatch(re.sub(r",(?=\d{3}(\D|$))", "", text.strip().strip("$ ")))
    if found is None or (found[3] and not int(found[3])):
        return None
    whole, decimals, divisor = found.groups()
    value = Fraction(f"{whole}.{decimals}" if decimals else whole)
    return value / int(divisor) if divisor else value
