"""GRPOTrainer of TRL on two-digit sums, until success on held-out ones reaches a mark.

    trl_sums.py MODEL TRAIN.jsonl HELD_OUT.jsonl MARK BATCH UPDATES SEED

It runs in the environment of the peer: on as many threads as OMP_NUM_THREADS says. An update has 64
replies to 8 questions. After every four updates it answers the held-out questions greedily, and
prints a line of JSON: the update, the success, and the wall and processor seconds since the
beginning of `train`, without these evaluations.
"""

import json
import re
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer
from trl_settings import ON_CPU

ROWS, MEMBERS, TOKENS, EVERY, LR = 64, 8, 16, 4, 1e-5


def correct(completions: list, answer: list[str], **_: Any) -> list[float]:
    """Return 1 for each reply whose last number is the answer, else 0."""
    said = (re.findall(r"-?\d+", completion[0]["content"]) for completion in completions)
    return [float(found[-1:] == [right]) for found, right in zip(said, answer, strict=True)]


class HeldOut(TrainerCallback):
    """Successes on held-out questions, timed without themselves; ends the training at the mark."""

    def __init__(self, rows: list[dict[str, str]], tokenizer: Any, mark: float) -> None:
        self.rows, self.tokenizer, self.mark = rows, tokenizer, mark
        self.out_s = [0.0, 0.0]  # wall, processor

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.began_s = [time.perf_counter(), time.process_time()]
        self._evaluate(0, kwargs["model"])

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step % EVERY == 0:
            success = self._evaluate(state.global_step, kwargs["model"])
            control.should_training_stop |= success >= self.mark

    @torch.no_grad()
    def _evaluate(self, step: int, model: Any) -> float:
        now_s = [time.perf_counter(), time.process_time()]
        times = (n - b - o for n, b, o in zip(now_s, self.began_s, self.out_s, strict=True))
        right = 0.0
        for start in range(0, len(self.rows), ROWS):
            rows = self.rows[start : start + ROWS]
            inputs = self.tokenizer.apply_chat_template(
                [[{"role": "user", "content": row["question"]}] for row in rows],
                add_generation_prompt=True,
                padding=True,
                padding_side="left",
                return_dict=True,
                return_tensors="pt",
            )
            out = model.generate(**inputs, max_new_tokens=TOKENS, do_sample=False)
            replies = self.tokenizer.batch_decode(
                out[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True
            )
            said = [[{"role": "assistant", "content": reply}] for reply in replies]
            right += sum(correct(said, [row["answer"] for row in rows]))
        after_s = [time.perf_counter(), time.process_time()]
        self.out_s = [o + a - n for o, a, n in zip(self.out_s, after_s, now_s, strict=True)]
        success = right / len(self.rows)
        wall_s, used_s = times
        row = {"step": step, "success": success, "wall_s": wall_s, "used_s": used_s}
        print(json.dumps(row), flush=True)
        return success


def main() -> None:
    model, train, held_out = sys.argv[1:4]
    mark, batch, updates, seed = float(sys.argv[4]), *map(int, sys.argv[5:8])
    rows = [json.loads(line) for line in Path(train).read_text().splitlines()]
    tested = [json.loads(line) for line in Path(held_out).read_text().splitlines()]
    tokenizer = AutoTokenizer.from_pretrained(model)
    asked = [[{"role": "user", "content": row["question"]}] for row in rows]
    with tempfile.TemporaryDirectory() as directory:
        arguments = GRPOConfig(
            output_dir=directory,
            seed=seed,
            max_steps=updates,
            per_device_train_batch_size=batch,
            gradient_accumulation_steps=ROWS // batch,
            steps_per_generation=ROWS // batch,
            num_generations=MEMBERS,
            max_completion_length=TOKENS,
            learning_rate=LR,
            **ON_CPU,
        )
        trainer = GRPOTrainer(
            model=model,
            processing_class=tokenizer,
            reward_funcs=correct,
            args=arguments,
            train_dataset=Dataset.from_dict(
                {"prompt": asked, "answer": [row["answer"] for row in rows]}
            ),
        )
        trainer.add_callback(HeldOut(tested, tokenizer, mark))
        trainer.train()


if __name__ == "__main__":
    main()
