"""What the code environment asks: a question, and what decides whether an answer is right."""

import json
import re
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

_NUMBER = re.compile(r"([+-]?\d{1,60})(?:\.(\d{1,60}))?(?:/(\d{1,60}))?")
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


@dataclass(frozen=True, kw_only=True)
class Problem:
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
        """The program that puts an answer to the hidden tests. It holds no result: what has to
        come out is compared outside, where a program cannot read it."""
        cases = json.dumps([arguments for arguments, _ in self.tests])
        return answer + HARNESS.format(cases=cases, function=self.function)

    def passed(self, stdout: str) -> bool:
        """Whether every test came out right, by what the examination wrote."""
        last = stdout.rstrip("\n").rpartition("\n")[2]
        return last == json.dumps([json.dumps(result, sort_keys=True) for _, result in self.tests])


def same(text: str, answer: str) -> bool:
    """Whether an answer is the right one: as a number where both are one, else as a text."""
    given, wanted = number(text), number(answer)
    if given is not None and wanted is not None:
        return given == wanted
    return " ".join(text.split()).lower() == " ".join(answer.split()).lower()


def number(text: str) -> Fraction | None:
    """The value of `12`, `-1.50`, `3/4` or `1,000`; None for what is not written like these."""
    found = _NUMBER.fullmatch(re.sub(r",(?=\d{3}(\D|$))", "", text.strip().strip("$ ")))
    if found is None or (found[3] and not int(found[3])):
        return None
    whole, decimals, divisor = found.groups()
    value = Fraction(f"{whole}.{decimals}" if decimals else whole)
    return value / int(divisor) if divisor else value
