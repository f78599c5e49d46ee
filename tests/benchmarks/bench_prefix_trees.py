"""Prefix trees against packed rows: forward and backward passes over groups that share a prompt.

    OMP_NUM_THREADS=1 python tests/benchmarks/bench_prefix_trees.py [HIDDENxLAYERS ...]

Groups of 8 members, prompts four times as long as answers, every answer token trains. Both layouts
compute the same log-probs and gradients of the same rows (`learner.prefix_trees` never and always),
alternating; the ratio is that of processor seconds, laying out the rows included.
"""

import statistics
import sys
import tempfile
import time

import numpy as np
import torch

from evolver_async.model import policy
from learner.data.batch import Batch
from learner.data.packing import Layout

GROUPS, MEMBERS, PROMPT, ANSWER = 4, 8, 256, 64
SIZES = ("64x2", "128x2", "256x4")
BUDGET, ROUNDS, REQUIRED = 16384, 5, 2.5
LAYOUTS: tuple[Layout, Layout] = ("packed", "tree")


def groups(vocabulary: int) -> Batch:
    """One row a member; the members of a group share their prompt."""
    rng = np.random.Generator(np.random.Philox(key=0))
    rows, length = GROUPS * MEMBERS, PROMPT + ANSWER
    prompt_GT = rng.integers(0, vocabulary, (GROUPS, PROMPT), np.int32).repeat(MEMBERS, 0)
    tokens_RT = np.concatenate(
        [prompt_GT, rng.integers(0, vocabulary, (rows, ANSWER), np.int32)], 1
    )
    tokens_N = rows * ANSWER
    return Batch(
        tokens=tokens_RT.ravel(),
        action=np.broadcast_to(np.arange(length) >= PROMPT, tokens_RT.shape).ravel(),
        row_start_R=np.arange(rows + 1) * length,
        action_start_R=np.arange(rows + 1) * ANSWER,
        trajectory_R=np.arange(rows),
        mu_N=np.full(tokens_N, -np.log(vocabulary), np.float32),
        lag_N=np.zeros(tokens_N, np.int64),
        abandoned_N=np.zeros(tokens_N, bool),
        swapped_N=np.zeros(tokens_N, bool),
        turn_N=np.zeros(tokens_N, np.int64),
        trajectory_N=np.arange(rows).repeat(ANSWER),
        group_P=np.arange(rows) // MEMBERS,
        peer_P=np.arange(rows) // MEMBERS,
        reward_P=np.zeros(rows),
        length_P=np.full(rows, ANSWER),
        lag_P=np.zeros(rows, np.int64),
        written_P=np.zeros(rows, bool),
        guided_P=np.zeros(rows, bool),
        copied_P=np.zeros(rows, bool),
        stripped_P=np.zeros(rows, bool),
        truncated_P=np.zeros(rows, bool),
        overlong_P=np.zeros(rows, bool),
        turn_start_P=np.arange(rows + 1),
        turn_reward_U=np.zeros(rows),
        label_U=np.zeros(rows, np.int8),
    )


def passed(model: torch.nn.Module, batch: Batch, layout: Layout) -> tuple[float, float, int]:
    """Return processor seconds of a pass over all rows, its loss, and the tokens it computed."""
    total, tokens, start = 0.0, 0, time.process_time()
    device = next(model.parameters()).device
    for micro in batch.whole().micro_batches(BUDGET, device, layout):
        hidden_KD = policy.hidden_states(model, micro.tokens_BT, micro.borders, micro.read_K)
        hidden_QD = hidden_KD.index_select(0, micro.source_Q)
        found_Q, _ = policy.target_logprobs(model, hidden_QD, micro.target_Q, 1.0, 4096)
        logprobs_N = found_Q.index_select(0, micro.prediction_N)
        loss = -logprobs_N.sum() / len(batch.mu_N)
        loss.backward()
        total, tokens = total + float(loss.detach()), tokens + micro.tokens_BT.numel()
    return time.process_time() - start, total, tokens


def compare(hidden_size: int, layers: int) -> None:
    with tempfile.TemporaryDirectory() as directory:
        policy.make_tiny(
            directory,
            seed=0,
            hidden_size=hidden_size,
            layers=layers,
            heads=4,
            intermediate_size=3 * hidden_size,
            max_length=512,
        )
        model = policy.load_model(directory, dtype="float32", device="cpu")
    batch = groups(model.config.vocab_size)
    ratios, seconds, found = [], {}, {}
    for _ in range(ROUNDS + 1):  # the first warms up
        spent = {}
        for layout in LAYOUTS:
            spent[layout], loss, tokens = passed(model, batch, layout)
            grads = [one.grad for one in model.parameters() if one.grad is not None]
            gradient = torch.cat([grad.flatten() for grad in grads])
            found[layout] = loss, tokens, gradient
            model.zero_grad()
        ratios.append(spent["packed"] / spent["tree"])
        seconds = spent
    (loss, tokens, gradient), (loss_then, shared, gradient_then) = found["packed"], found["tree"]
    assert abs(loss - loss_then) <= 1e-5
    assert float((gradient - gradient_then).abs().max()) <= 1e-5
    print(
        f"{hidden_size}x{layers}: {statistics.median(ratios[1:]):.2f} x packed rows "
        f"({min(ratios[1:]):.2f} to {max(ratios[1:]):.2f}, wanted {REQUIRED}); "
        f"{tokens} tokens computed as {shared}; "
        f"{tokens / seconds['packed']:.0f} and {tokens / seconds['tree']:.0f} tokens a processor "
        "second in the last round",
        flush=True,
    )


def main() -> None:
    torch.set_num_threads(1)
    for size in sys.argv[1:] or SIZES:
        compare(*(int(one) for one in size.split("x")))


if __name__ == "__main__":
    main()
