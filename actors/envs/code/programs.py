"""Small programming tasks: a function of a list of integers, in two steps and a result."""

import random
from collections.abc import Callable
from typing import Any, NamedTuple

from actors.envs.code.problems import Problem
from evolver_async.randomness import key
from evolver_async.splits import Split, split_of

QUESTION = "write f(x) for a list x of integers: {first}, then {second}, and return {last}.{cases}"
EXAMPLES, TESTS = 2, 8
LONGEST, LARGEST = 7, 20
MAX_DRAWS = 1000


class ProgramPart(NamedTuple):
    """A step or a result: in words, as code over `x`, and as a function of `x` and of `k`."""

    words: str
    code: str
    function: Callable[[list[int], int], Any]


STEPS = (
    ProgramPart("add {k} to each", "[v + {k} for v in x]", lambda x, k: [v + k for v in x]),
    ProgramPart("multiply each by {k}", "[v * {k} for v in x]", lambda x, k: [v * k for v in x]),
    ProgramPart("square each", "[v * v for v in x]", lambda x, k: [v * v for v in x]),
    ProgramPart(
        "keep those above {k}", "[v for v in x if v > {k}]", lambda x, k: [v for v in x if v > k]
    ),
    ProgramPart(
        "keep the even ones", "[v for v in x if v % 2 == 0]", lambda x, k: [*filter(_even, x)]
    ),
    ProgramPart("drop the first {k}", "x[{k}:]", lambda x, k: x[k:]),
    ProgramPart("keep the last {k}", "x[-{k}:]", lambda x, k: x[-k:]),
    ProgramPart("reverse them", "x[::-1]", lambda x, k: x[::-1]),
    ProgramPart("sort them", "sorted(x)", lambda x, k: sorted(x)),
    ProgramPart(
        "keep each value once, in order", "list(dict.fromkeys(x))", lambda x, k: [*_once(x)]
    ),
)
RESULTS = (
    ProgramPart("the list", "x", lambda x, k: x),
    ProgramPart("their sum", "sum(x)", lambda x, k: sum(x)),
    ProgramPart("how many there are", "len(x)", lambda x, k: len(x)),
    ProgramPart(
        "the largest, 0 where there is none", "max(x, default=0)", lambda x, k: max(x, default=0)
    ),
)


def _even(value: int) -> bool:
    return value % 2 == 0


def _once(values: list[int]) -> dict[int, None]:
    return dict.fromkeys(values)


class ProgramPlan(NamedTuple):
    """Two steps with their numbers, and what is returned."""

    first: ProgramPart
    k: int
    second: ProgramPart
    n: int
    last: ProgramPart

    def code(self) -> str:
        first, second = self.first.code.format(k=self.k), self.second.code.format(k=self.n)
        return f"def f(x):\n    x = {first}\n    x = {second}\n    return {self.last.code}"

    def value(self, x: list[int]) -> Any:
        return self.last.function(self.second.function(self.first.function(x, self.k), self.n), 0)


def draw_program(split: Split, map_seed: int) -> Problem:
    """Return the task of (split, map_seed): the first draw whose code hashes into the split and
    whose tests distinguish it from wrong answers."""
    rng = random.Random(key(map_seed, "programs", split))
    for _ in range(MAX_DRAWS):
        plan = _plan(rng)
        if split_of(plan.code()) != split:
            continue
        inputs = [[], *(_numbers(rng) for _ in range(EXAMPLES + TESTS - 1))]
        shown, hidden = inputs[-EXAMPLES:], inputs[:-EXAMPLES]
        results = [plan.value(x) for x in hidden]
        others = {_plan(rng) for _ in range(8)}
        wrong = sorted(p.code() for p in others if [p.value(x) for x in hidden] != results)
        if wrong and len({str(result) for result in results}) > TESTS // 2:
            return _problem(plan, shown, [*zip(hidden, results, strict=True)], wrong)
    raise ValueError(f"split: no task of {split} in {MAX_DRAWS} draws")


def _problem(
    plan: ProgramPlan, shown: list[list[int]], tests: list[tuple[list[int], Any]], wrong: list[str]
) -> Problem:
    cases = "".join(f" f({x}) = {plan.value(x)}" for x in shown)
    question = QUESTION.format(
        first=plan.first.words.format(k=plan.k),
        second=plan.second.words.format(k=plan.n),
        last=plan.last.words,
        cases=cases,
    )
    code = plan.code()
    trial = f"{code}\nprint(f({shown[0]}))"
    return Problem(
        question=question,
        tests=tuple(([x], result) for x, result in tests),
        program=trial,
        solution=code,
        wrong=tuple(wrong),
        broken=(
            trial.replace("):", ")", 1),
            trial.replace("    return", "    y\n    return"),
            trial[:-1],
        ),
    )


def _plan(rng: random.Random) -> ProgramPlan:
    first, second = rng.sample(STEPS, 2)
    return ProgramPlan(first, rng.randint(2, 9), second, rng.randint(1, 4), rng.choice(RESULTS))


def _numbers(rng: random.Random) -> list[int]:
    return [rng.randint(-LARGEST, LARGEST) for _ in range(rng.randint(3, LONGEST))]
