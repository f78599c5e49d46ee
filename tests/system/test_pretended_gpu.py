"""Whole runs on a pretended GPU: no tensor of one device meets one of the other.

The runs differ in losses, passes and stages. What passes is free of this fault alone; see
`pretended_gpu` for what it does not know.
"""

import asyncio
import json
from pathlib import Path

import pytest
import torch
from engine_conformance import V0
from gpu_models import SHARPNESS, SMALL, TOKENIZER, differences, requests
from pretended_gpu import GpuTensor, operations, pretended
from serial_runs import trainer
from transformers.models.auto import AutoModelForCausalLM

from actors.engines.decoding.fused import FusedDecoder
from actors.engines.engine import Generation
from actors.engines.torch_engine import TorchEngine
from evolver_async.config.load import load
from evolver_async.launch.serial import run

RECIPE = """
env: {name: frozen_lake, params: {size: 3, slippery: false, grid: first}}
policy: {max_length: 512, hidden_size: 32, layers: 1, heads: 2, intermediate_size: 64}
rollout: {group_size: 4, max_turns: 3, max_tokens: 4}
actors: {count: 2, groups: 2}
buffer: {max_staleness: 2}
advantage: {std: batch}
learner:
  {groups_per_step: 4, minibatches: 2, lr: 5.0e-3, decay: none, token_budget: 1024, device: cuda}
engine: {device: cuda}
stages:
  - {kind: sft, steps: 1, override: {rollout: {group_size: 1}, learner: {minibatches: 1}}}
  - {kind: rl, steps: 2}
eval: {every: 2, episodes: 2, final_episodes: 2}
checkpoint: {every: 2}
launch: {kind: serial}
"""
GUIDED = [
    "experience.kind=contrast",
    "rollout.guided_fraction=0.5",
    "stages=[{kind: rl, steps: 3}]",
]
RUNS = {
    "a reference, entropy and bounds on updates": [
        "loss.kl_coef=0.01",
        "loss.entropy_coef=0.01",
        "loss.entropy_top_k=2",
        "loss.target_kl=0.001",
        "correction.kind=icepop",
    ],
    "adapters in bfloat16": ["policy.lora.rank=2", "policy.dtype=bfloat16", "loss.kl_coef=0.01"],
    "a critic of its own": [
        "advantage.kind=gae_bilevel",
        "critic.kind=separate",
        "learner.gradient_checkpointing=true",
    ],
    "a shared critic": ["advantage.kind=vtrace", "correction.kind=none"],
    "distillation": [*GUIDED, "experience.internalise=distill"],
    "stripping": [*GUIDED, "experience.reliance_coef=0.5", "correction.guided=behaviour"],
    "sequence ratios and its own judge": [
        "correction.kind=gspo",
        "correction.anchor=interpolate",
        "judge.kind=self",
        "advantage.kind=adca",
        "policy.max_length=1024",
    ],
    "pairs and a model of the world": [
        "stages=[{kind: world_model, steps: 1, alternatives: 1}, {kind: rl, steps: 1},"
        " {kind: dpo, steps: 1}]",
    ],
}


@pytest.mark.process
@pytest.mark.parametrize("changes", RUNS.values(), ids=RUNS)
def test_a_run_keeps_its_devices_apart(changes: list[str], tmp_path: Path) -> None:
    operations.clear()
    with pretended():
        finished = trainer(tmp_path, RECIPE)("gpu", *changes)
    assert operations["aten::mm"] > 0
    assert not any(row.get("alarm/weights") for row in finished.rows)  # the engine has them, too


@pytest.mark.process
def test_a_resume_puts_moments_on_the_device(tmp_path: Path) -> None:
    with pretended():
        finished = trainer(tmp_path, RECIPE)("gpu", "loss.kl_coef=0.01")
        longer = load(finished.run_dir / "config.yaml", ["stages.1.steps=3"])
        assert run(longer, finished.run_dir) == 0
    lines = (finished.run_dir / "metrics.jsonl").read_text().splitlines()
    assert max(json.loads(line)["step"] for line in lines) == 4


def test_an_engine_whose_heads_share_keys_agrees_with_the_learner() -> None:
    """Prompts are longer than the chunks of their prefill, so passes have one token and several."""
    with pretended():
        torch.manual_seed(0)
        with torch.device("cuda"):
            how = {"attn_implementation": "sdpa", "dtype": torch.float32}
            model = AutoModelForCausalLM.from_config(SMALL, **how).eval()
        with torch.no_grad():
            model.model.norm.weight.mul_(SHARPNESS)
        assert FusedDecoder.fits(model) and SMALL.num_key_value_heads < SMALL.num_attention_heads
        asked = requests()
        engine = TorchEngine(
            model,
            TOKENIZER,
            weights=V0,
            slots=8,
            max_length=256,
            prefill_tokens=64,
            in_flight="keep",
        )

        async def play() -> list[Generation]:
            try:
                return list(await asyncio.gather(*(engine.generate(one) for one in asked)))
            finally:
                await engine.close()

        delta_N = differences(model, asked, asyncio.run(play()))
    assert delta_N.abs().max() < 1e-3


def test_what_a_gpu_refuses_is_refused() -> None:
    with pretended():
        on_gpu, on_host = torch.ones(3, device="cuda"), torch.ones(3)
        with pytest.raises(RuntimeError, match="all tensors on cuda:0"):
            _ = on_gpu + on_host
        with pytest.raises(RuntimeError, match="all tensors on cuda:0"):
            _ = on_host[torch.tensor([1], device="cuda")]
        with pytest.raises(TypeError, match="to numpy"):
            on_gpu.numpy()
        leaf = torch.ones(3).requires_grad_()
        (leaf.to("cuda") * on_gpu).sum().backward()
        assert not isinstance(leaf.grad, GpuTensor)
        assert (on_gpu * 2.0)[torch.tensor([1])].tolist() == [2.0]
        assert (on_gpu + torch.tensor(1.0)).cpu().numpy().tolist() == [2.0] * 3


def test_gradients_are_those_of_the_cpu() -> None:
    def gradient(device: str) -> torch.Tensor:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Embedding(9, 4), torch.nn.Linear(4, 4)).to(device)
        model[1].weight = torch.nn.Parameter(model[1].weight.detach())
        tokens = torch.arange(6).to(device)
        model(tokens).index_select(0, tokens[:3]).square().sum().backward()
        return torch.cat([one.grad.flatten() for one in model.parameters()]).cpu()

    with pretended():
        pretended_grad = gradient("cuda")
    assert torch.equal(pretended_grad, gradient("cpu"))
