"""What memory log-probs and entropies need at their peak, forward and backward.

    OMP_NUM_THREADS=1 python tests/benchmarks/bench_logprob_memory.py

`policy.token_logprobs` of given hidden states against the same formula over all positions at once.
Each cell is what the peak of a process of its own (`ru_maxrss`) rose by, so it holds everything:
the gradients of the vocabulary projection, of which two exist while chunks are added up, and of the
hidden states too. The former grow with the vocabulary, the latter with the tokens; the logits of a
chunk, `LOGITS` values at most, with neither, and nothing with their product.
"""

import multiprocessing
import resource
import sys

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from evolver_async.model import policy
from evolver_async.model.logit_chunks import LOGITS

HIDDEN = 64
VOCABULARIES = (8192, 32768, 131072)
TOKENS = (512, 2048, 4096)
AT_ONCE = 1 << 28  # logits: more of them at once are not tried
UNIT = 2**20 / (1 if sys.platform == "darwin" else 2**10)  # ru_maxrss in MiB


def peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / UNIT


def at_once(model: torch.nn.Module, tokens_BT: torch.Tensor, hidden_BTD: torch.Tensor) -> None:
    head = policy.split_model(model)[1]
    logps_NV = head(hidden_BTD[0, :-1]).float().log_softmax(-1)
    picked_N = logps_NV.gather(-1, tokens_BT[0, 1:, None])
    entropy_N = -(logps_NV.exp() * logps_NV).sum(-1)
    (picked_N.sum() + entropy_N.sum()).backward()


def in_chunks(model: torch.nn.Module, tokens_BT: torch.Tensor, hidden_BTD: torch.Tensor) -> None:
    found = policy.token_logprobs(
        model, tokens_BT, torch.ones_like(tokens_BT), hidden_BTD=hidden_BTD, with_entropy=True
    )
    torch.stack([part.sum() for part in found]).sum().backward()


def needed(way: str, vocabulary: int, tokens: int) -> float:
    """MiB that this process's peak rises by."""
    torch.set_num_threads(1)
    shape = LlamaConfig(
        hidden_size=HIDDEN,
        intermediate_size=HIDDEN,
        num_hidden_layers=1,
        num_attention_heads=2,
        vocab_size=vocabulary,
    )
    model = AutoModelForCausalLM.from_config(shape)
    tokens_BT = torch.randint(0, vocabulary, (1, tokens + 1))
    hidden_BTD = torch.randn(1, tokens + 1, HIDDEN, requires_grad=True)
    run = {"at once": at_once, "in chunks": in_chunks}[way]
    run(model, tokens_BT[:, :17], hidden_BTD[:, :17])  # libraries load what they need
    model.zero_grad()
    hidden_BTD.grad = None
    before = peak()
    run(model, tokens_BT, hidden_BTD)
    return peak() - before


def main() -> None:
    pool = multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1)
    print(f"MiB at the peak; one chunk of logits: {LOGITS[False] * 4 / 2**20:.0f} MiB in float32")
    print(f"{'way':>10} {'vocabulary':>10} " + " ".join(f"{f'{t} tokens':>12}" for t in TOKENS))
    with pool:
        for way in ("at once", "in chunks"):
            for vocabulary in VOCABULARIES:
                cells = [
                    f"{pool.apply(needed, (way, vocabulary, tokens)):>12.0f}"
                    if way == "in chunks" or vocabulary * tokens <= AT_ONCE
                    else f"{'-':>12}"
                    for tokens in TOKENS
                ]
                print(f"{way:>10} {vocabulary:>10} " + " ".join(cells), flush=True)


if __name__ == "__main__":
    main()
