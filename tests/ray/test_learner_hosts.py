"""A learner whose ranks run on two nodes of a cluster, one of which is lost."""

import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from launches import Launch, wait_for
from ray_nodes import BUFFER, WORKERS, Hosts, free_port

from evolver_async.checkpoint.checkpoints import valid
from evolver_async.wire.keys import make

RECIPE = """
env: {{name: bandit}}
policy: {{max_length: 128, hidden_size: 16, layers: 1, heads: 2, intermediate_size: 32}}
rollout: {{group_size: 4, max_turns: 1, max_tokens: 4}}
actors: {{count: 1, groups: 2}}
advantage: {{kind: reinforce}}
buffer: {{address: "tcp://{buffer}", lease_s: 4, stall_s: 120, archive: none}}
learner:
  {{groups_per_step: 2, minibatches: 1, decay: none, token_budget: 512, ranks: 2, hosts: 2,
    address: "tcp://{learner}", deadline_s: 60}}
stages: [{{kind: rl, hours: 1}}]
eval: {{every: 0, episodes: 4}}
checkpoint: {{every: 2}}
metrics: {{panel: none}}
weights: {{dir: {directory}}}
security: {{keys: {directory}/keys}}
launch: {{kind: ray, ray: {{address: auto, shared: true}}, restarts: 30, backoff_s: 0.1}}
run: {{dir: {directory}, name: run}}
"""


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    with pytest.MonkeyPatch.context() as patch:
        one = Hosts()
        patch.setenv("RAY_ADDRESS", one.address)
        try:
            yield one
        finally:
            one.end()


def nodes(run: Launch, rank: str) -> list[str]:
    """The nodes of a rank, in the order of its starts, by the beginning of their ids."""
    log = (run.run_dir / "logs" / "launcher.log").read_text()
    return re.findall(rf" {rank} runs on node (\w+)", log)


def test_ranks_on_two_nodes_go_on_when_the_second_is_lost(
    hosts: Hosts, tmp_path: Path, launch: Callable[..., Launch]
) -> None:
    make(tmp_path / "keys", [])
    first, second = WORKERS
    addresses = {"buffer": f"{BUFFER}:{free_port()}", "learner": f"{first}:{free_port()}"}
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(RECIPE.format(directory=tmp_path, **addresses))
    run = launch(tmp_path / "run", recipe)
    run.wait_for_steps(3)
    places = [hosts.host_of(nodes(run, rank)[-1]) for rank in ("learner", "learner-1")]
    assert places == [first, second]
    hosts.lose(second)
    hosts.join(second)
    wait_for(lambda: len(nodes(run, "learner-1")) > 1, "the second rank on another node")
    run.wait_for_steps(3)
    assert hosts.host_of(nodes(run, "learner")[-1]) == first
    run.process.send_signal(signal.SIGTERM)
    code, errors = run.end()
    assert code == 128 + signal.SIGTERM, errors
    assert valid(tmp_path / "run" / "checkpoints")
