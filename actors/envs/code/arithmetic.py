"""Products of two-digit numbers modulo 1000: hard to guess, easy to compute by program."""

import random

from actors.envs.code.problems import Problem
from evolver_async.randomness import key
from evolver_async.splits import Split, split_of

MODULUS = 1000
QUESTION = "{a} * {b} % 1000 = ?"
WRONG = 20


def draw_product(split: Split, map_seed: int) -> Problem:
    """Return the product of (split, map_seed): the first draw whose content hashes into the
    split."""
    rng = random.Random(key(map_seed, "arithmetic", split))
    while True:
        a, b = rng.randint(10, 99), rng.randint(10, 99)
        if split_of(f"{min(a, b)}*{max(a, b)}") == split:
            break
    right = a * b % MODULUS
    wrong = rng.sample([guess for guess in range(MODULUS) if guess != right], WRONG)
    return Problem(
        question=QUESTION.format(a=a, b=b),
        answer=str(right),
        program=f"print({a}*{b}%1000)",
        solution=str(right),
        wrong=tuple(map(str, wrong)),
        broken=(f"print({a}*{b}%1000", f"print({a}*{b}%)", f"print({a}*{b}%0)", f"print(a*{b})"),
    )
