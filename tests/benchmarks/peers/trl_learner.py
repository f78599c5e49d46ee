"""GRPOTrainer of TRL over given answers: the processor seconds of its steps.

    trl_learner.py ANSWERS.json MODEL BATCH GENERATIONS UPDATES LEARNING_RATE ADAM_EPSILON

It runs in the environment of the peer. `rollout_func` gives the trainer the answers of the file;
all else is TRL's code. A step is UPDATES optimizer updates over all answers, which come from
GENERATIONS calls of `rollout_func`. A line on stdin starts a step; its figures go to stdout as
JSON. It counts from each return of `rollout_func` to the next call of it: decoding, padding,
rewards, advantages, old log-probs if TRL scores them, loss, backward, AdamW, the data loader.
"""

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer
from trl_settings import ON_CPU, rewards

STEPS = 1000  # the parent ends the process long before


class Answers:
    """Answers of all groups, given a part of the groups at a time."""

    def __init__(self, groups: list[dict[str, Any]], generations: int) -> None:
        self.groups = groups
        self.generations = generations
        self.calls = 0
        self.spent_s = self.left_s = 0.0
        self.updates = 0

    def __call__(self, prompts: list[str], trainer: GRPOTrainer) -> dict[str, list[Any]]:
        self.spent_s += time.process_time() - self.left_s
        if self.calls % self.generations == 0:
            self._wait(trainer.state.global_step)
        self.calls += 1
        size = trainer.num_generations
        rows = [
            {"prompt_ids": self.groups[int(prompt)]["prompt"]}
            | self.groups[int(prompt)]["members"][index % size]
            for index, prompt in enumerate(prompts)
        ]
        answers = {name: [row[name] for row in rows] for name in rows[0]}
        self.left_s = time.process_time()
        return answers

    def _wait(self, updates: int) -> None:
        """Print the figures of the step that ended, and wait for the parent to ask for another."""
        if self.calls:
            figures = {"used_s": self.spent_s, "updates": updates - self.updates}
            print(json.dumps(figures), flush=True)
        if not sys.stdin.readline():
            sys.exit(0)
        self.spent_s, self.updates = 0.0, updates


def main() -> None:
    answers, model = Path(sys.argv[1]), sys.argv[2]
    batch, generations, updates = (int(one) for one in sys.argv[3:6])
    learning_rate, epsilon = (float(one) for one in sys.argv[6:])
    groups = json.loads(answers.read_text())
    size = len(groups[0]["members"])
    per_update = len(groups) * size // updates
    with tempfile.TemporaryDirectory() as directory:
        config = GRPOConfig(
            output_dir=directory,
            max_steps=STEPS * updates,
            per_device_train_batch_size=batch,
            gradient_accumulation_steps=per_update // batch,
            steps_per_generation=len(groups) * size // generations // batch,
            num_generations=size,
            learning_rate=learning_rate,
            adam_epsilon=epsilon,
            **ON_CPU,
        )
        prompts = [str(index) for _ in range(STEPS) for index in range(len(groups))]
        trainer = GRPOTrainer(
            model=model,
            reward_funcs=rewards,
            args=config,
            train_dataset=Dataset.from_dict({"prompt": prompts}),
            rollout_func=Answers(groups, generations),
        )
        trainer.train()


if __name__ == "__main__":
    main()
