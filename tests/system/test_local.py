"""A whole run as its user sees it: real processes, real sockets, real kills.

One run is shared by the tests. It has no end of its own: an actor joins it and leaves again, its
learner is killed, Ctrl-C stops it. It is resumed with an end, to which it comes though an actor is
killed; `evolver-async eval` and `export` are tried on it.
"""

import json
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from launches import COMMAND, DEADLINE_S, Launch, alive, launching, wait_for
from safetensors.torch import load_file
from shares import check_shares
from transformers import AutoModelForCausalLM, AutoTokenizer

from evolver_async.buffer.service import BufferService
from evolver_async.checkpoint.checkpoints import valid
from evolver_async.cli import main
from evolver_async.config.load import load
from evolver_async.launch.run_directory import address_of
from evolver_async.model import policy

GROUPS, MEMBERS = 2, 4  # of one step, of one group
SFT_STEPS, MORE = 5, 40  # the latter after the resume
EVERY = 20  # versions, between two evaluations
RECIPE = f"""
env: {{name: bandit, latency: {{kind: fixed, median_s: 0.1}}}}
policy: {{max_length: 64, hidden_size: 16, layers: 1, heads: 2, intermediate_size: 32}}
rollout: {{group_size: {MEMBERS}, max_turns: 1, max_tokens: 4}}
actors: {{count: 2, groups: 2}}
learner: {{groups_per_step: {GROUPS}, minibatches: 1, decay: none, token_budget: 512}}
stages:
  - kind: sft
    steps: {SFT_STEPS}
    override: {{rollout: {{group_size: 1}}, learner: {{groups_per_step: 8}}}}
  - kind: rl
    steps: 1000000
eval: {{every: {EVERY}, episodes: 8, final_episodes: 16}}
checkpoint: {{every: 4}}
metrics: {{panel: none}}
launch: {{backoff_s: 0.1}}
"""
NAMES = """
step time_s train/reward_mean train/reward_std train/success staleness/mean staleness/max
offpolicy/ess offpolicy/kl offpolicy/clip_low offpolicy/clip_high loss/policy loss/entropy
loss/grad_norm throughput/tokens_per_s throughput/groups_per_s buffer/ready buffer/open
ledger/received ledger/trained ledger/filtered ledger/evicted ledger/rejected ledger/duplicate
ledger/stale weights/publish_s time/wait_s time/train_s
"""


@dataclass
class Finished:
    """A run that came to its end; `seen` holds what was observed on the way."""

    run_dir: Path
    code: int
    errors: str
    seen: dict[str, Any] = field(default_factory=dict)

    @property
    def rows(self) -> list[dict[str, Any]]:
        lines = (self.run_dir / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]

    @property
    def steps(self) -> list[dict[str, Any]]:
        return [row for row in self.rows if "stage_kind" in row]

    @property
    def evals(self) -> list[dict[str, Any]]:
        """By version: the episodes of two that overlap may end in either order."""
        rows = [row for row in self.rows if "eval/success" in row]
        return sorted(rows, key=lambda row: row["eval/version"])


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("system") / "recipe.yaml"
    path.write_text(RECIPE + f"run: {{dir: {path.parent}}}\n")
    return path


@pytest.fixture(scope="module")
def start() -> Iterator[Callable[..., Launch]]:
    with launching() as start:
        yield start


def in_rl(row: dict[str, Any]) -> bool:
    return row.get("stage_kind") == "rl"


@pytest.fixture(scope="module")
def interrupted(recipe: Path, start: Callable[..., Launch]) -> Finished:
    """Goes through everything that can happen to a run, and is stopped by Ctrl-C at last."""
    run_dir, began = recipe.parent / "interrupted", time.monotonic()
    run = start(run_dir, recipe, "run.name=interrupted", "actors.count=1")
    run.wait_for_row(in_rl, "reinforcement learning")
    seen = {"began": began, "guest": visit(run)}

    learner = run.children()["learner"]
    learner.kill()
    wait_for(lambda: not alive(learner), "the end of the learner")
    seen["kept"] = valid(run_dir / "checkpoints")[-1][1].step
    run.rows()
    first = run.wait_for_row(in_rl, "a step of the second learner")
    seen["first"] = first["step"]
    run.wait_for_row(lambda row: row["step"] > seen["kept"] + 10, "ten more steps")
    seen["status"] = run.status()

    children = run.children()
    run.process.send_signal(signal.SIGINT)
    ended = run.end()
    seen["left"] = [name for name, child in children.items() if alive(child)]
    return Finished(run_dir, *ended, seen)


def visit(run: Launch) -> dict[str, Any]:
    """An actor joins the run by hand, contributes, and is told to leave while it has tickets."""

    def guest_of(status: dict[str, Any]) -> dict[str, float]:
        return status["actors"].get("guest", {"leases": 0, "trajectories_per_s": 0.0})

    def works() -> bool:
        guest = guest_of(run.status())
        return guest["leases"] > 0 and guest["trajectories_per_s"] > 0

    command = [*COMMAND, "actor", "--connect", address_of(run.run_dir), "--name", "guest"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        wait_for(works, "trajectories of the guest")
        process.terminate()
        _, log = process.communicate(timeout=DEADLINE_S)
    finally:
        process.kill()
    status = run.status()
    return {"code": process.returncode, "log": log, "open": status["open"], **guest_of(status)}


@pytest.fixture(scope="module")
def resumed(interrupted: Finished, start: Callable[..., Launch]) -> Finished:
    """The interrupted run, taken up again with an end; one of two actors is killed on the way."""
    run_dir = interrupted.run_dir
    newest = valid(run_dir / "checkpoints")[-1][1].step
    seen = {"newest": newest, "rows": len(interrupted.rows), "end": newest + MORE}
    changes = f"stages.1.steps={newest + MORE - SFT_STEPS}", "actors.count=2"
    run = start(run_dir, "--resume", run_dir, *changes)
    seen["killed_at"] = run.wait_for_row(in_rl, "reinforcement learning")["step"]
    run.children()["actor-0"].kill()
    ended = run.end()
    wall_s = time.monotonic() - interrupted.seen["began"]
    return Finished(run_dir, *ended, seen | {"printed": run.printed, "wall_s": wall_s})


def test_the_documented_metrics_are_there(resumed: Finished) -> None:
    last = resumed.steps[-1]
    assert set(NAMES.split()) <= set(last)
    buckets = {name.split("/")[0] for name in last if name.startswith("lag_")}
    assert buckets and buckets <= {"lag_0", "lag_1", "lag_2", "lag_3-4"}
    assert max(row["staleness/max"] for row in resumed.steps if in_rl(row)) <= 4


def test_the_shares_of_every_process_add_up(resumed: Finished) -> None:
    check_shares(resumed.run_dir, resumed.seen["wall_s"], 3, rows=4)
    printed = resumed.seen["printed"]
    assert "\nactors " in printed and "learner " in printed
    assert " wait" in printed, "the advice says for what"


def test_evaluations_are_of_exact_versions(resumed: Finished) -> None:
    evals = resumed.evals
    last = resumed.steps[-1]["version"]
    assert {row["eval/version"] for row in evals} == {1, *range(EVERY, int(last), EVERY), last}
    assert {row["eval/episodes"] for row in evals} == {8}
    assert [row["eval/version"] for row in evals if row.get("eval/test/episodes") == 16] == [last]


def test_eval_plays_held_out_tasks(resumed: Finished, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", str(resumed.run_dir), "--episodes", "8"]) == 0
    said = capsys.readouterr().out
    assert f"step {resumed.seen['end']}: success " in said
    assert "over 8 validation episodes, 2 distinct" in said
    assert "(random policy 0.500, optimal policy 1.000" in said
    final = resumed.evals[-1]
    assert f"success {final['eval/success']:.3f}" in said, "the run's own evaluation said so"


def test_an_exported_policy_is_the_checkpoint_to_anybody(
    resumed: Finished, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "exported"
    assert main(["export", str(resumed.run_dir), str(out)]) == 0
    assert str(out) in capsys.readouterr().out
    exported = AutoModelForCausalLM.from_pretrained(out)
    tokenizer = AutoTokenizer.from_pretrained(out)
    chat = [{"role": "user", "content": "arms phoenix dragon"}]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    tokens_BT = tokenizer(text + "<answer>dragon</answer>", return_tensors="pt").input_ids
    with torch.no_grad():
        theirs_BT = exported(tokens_BT).logits[:, :-1].log_softmax(-1)
        theirs_BT = theirs_BT.gather(-1, tokens_BT[:, 1:, None])[..., 0]
        model = policy.load_model(resumed.run_dir / "policy", dtype="float32", device="cpu")
        began_BT, _ = policy.token_logprobs(model, tokens_BT, torch.ones_like(tokens_BT))
        newest = valid(resumed.run_dir / "checkpoints")[-1][0]
        policy.load_state(model, load_file(newest / "model.safetensors"))
        ours_BT, _ = policy.token_logprobs(model, tokens_BT, torch.ones_like(tokens_BT))
    torch.testing.assert_close(theirs_BT, ours_BT[:, 1:], atol=1e-5, rtol=0)
    assert not torch.allclose(began_BT, ours_BT, atol=1e-2), "training has changed the policy"
    assert main(["export", str(resumed.run_dir), str(out)]) == 2
    assert "is not empty" in capsys.readouterr().err


def test_an_actor_joins_by_hand_and_gives_its_tickets_back(interrupted: Finished) -> None:
    guest = interrupted.seen["guest"]
    assert guest["code"] == 0, guest["log"]
    assert guest["trajectories_per_s"] > 0
    assert guest["leases"] == 0
    assert not any("guest" in group for group in guest["open"])


def test_a_killed_learner_resumes_under_a_new_lineage(interrupted: Finished) -> None:
    seen = interrupted.seen
    assert "learner was killed by SIGKILL, restart 1 of 3" in interrupted.errors
    assert seen["first"] == seen["kept"] + 1
    assert seen["status"]["head"].startswith("2.")
    assert not any("actor" in line for line in interrupted.errors.splitlines())


def test_ctrl_c_leaves_a_checkpoint_and_no_process(interrupted: Finished) -> None:
    assert interrupted.code == 128 + signal.SIGINT
    assert interrupted.seen["left"] == []
    mine = str(interrupted.run_dir)
    assert not [p for p in psutil.process_iter(["cmdline"]) if mine in (p.info["cmdline"] or [])]
    newest = valid(interrupted.run_dir / "checkpoints")[-1][1].step
    assert newest == interrupted.steps[-1]["step"]


def test_a_resumed_run_goes_on_from_there_and_finishes_though_an_actor_is_killed(
    resumed: Finished,
) -> None:
    assert resumed.code == 0
    assert all("actor-0" in line for line in resumed.errors.splitlines()), resumed.errors
    assert "actor-0 was killed by SIGKILL" in resumed.errors
    seen = resumed.seen
    assert seen["newest"] < seen["killed_at"] < seen["end"]
    rows = [row for row in resumed.rows[seen["rows"] :] if "stage_kind" in row]
    assert [row["step"] for row in rows] == list(range(seen["newest"] + 1, seen["end"] + 1))
    assert {row["stage_kind"] for row in rows} == {"rl"}
    times = [row["time_s"] for row in resumed.steps[-len(rows) - 1 :]]
    assert times == sorted(times)
    newest, manifest = valid(resumed.run_dir / "checkpoints")[-1]
    assert manifest.step == seen["end"]
    assert json.loads((newest / "state.json").read_text())["lineage"] == 3
    adam = load_file(newest / "optimizer.safetensors")
    updates = {int(tensor) for name, tensor in adam.items() if name.startswith("step/")}
    assert updates == {seen["end"]}, "one a step, none lost and none repeated"
    assert resumed.evals[-1]["eval/test/episodes"] == 16


def test_every_group_is_trained_once_across_lineages_and_the_ledger_closes(
    resumed: Finished,
) -> None:
    """What came in is held or accounted for, after kills of an actor and a learner."""
    rl_steps = resumed.seen["end"] - SFT_STEPS
    assert resumed.steps[-1]["ledger/trained"] == rl_steps * GROUPS * MEMBERS
    service = BufferService.of_run(load(resumed.run_dir / "config.yaml"), resumed.run_dir, None, 0)
    state = service.store.state
    service.close()
    state.ledger.check(state.held())
    assert state.ledger.total("rollout", "trained").groups == rl_steps * GROUPS
