r"""A user's own part of a run: rows of a question and its answer, and a reward function.

    python examples/sums.py > sums.jsonl
    evolver-async train own policy.path=MODEL tasks.path=sums.jsonl tasks.prompt=question \
        reward='[examples.sums:correct]'
"""

import json
import random
import re


def correct(completions: list, answer: list[str], **_: object) -> list[float]:
    """Return 1 for each reply whose last number is the answer, else 0."""
    said = (re.findall(r"-?\d+", completion[0]["content"]) for completion in completions)
    return [float(found[-1:] == [right]) for found, right in zip(said, answer, strict=True)]


if __name__ == "__main__":
    pairs = [(a, b) for a in range(10, 100) for b in range(10, 100)]
    for a, b in random.Random(0).sample(pairs, 2000):
        question = f"What is {a} + {b}? Reply with the number only."
        print(json.dumps({"question": question, "answer": str(a + b)}))
