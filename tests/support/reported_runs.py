"""Run directories as runs leave them, made in a moment: a journal of chosen texts, and metrics."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from buffer_world import World
from buffer_world import config as small
from episodes import episode

from evolver_async.config import Config
from evolver_async.config.load import dump
from evolver_async.metrics.writer import JsonlWriter
from evolver_async.model.tiny import make_tokenizer
from evolver_async.schema import Role, Sequence, Ticket, Trajectory, VersionRun
from evolver_async.wire import messages

HOSTILE = "</script><script>document.body.dataset.broken = 1</script><img src=x onerror=alert(1)>"
SEGMENT_BYTES = 1 << 12  # so that a few trajectories fill one


class MadeRun:
    """A run directory with its buffer still open; `texts` are the turns of every trajectory."""

    def __init__(self, run_dir: Path, *, segment_bytes: int = 1 << 20, **buffer: Any) -> None:
        self.run_dir = run_dir
        run_dir.mkdir(parents=True)
        self.tokenizer = make_tokenizer(64)
        self.tokenizer.save_pretrained(run_dir / "policy")
        made: Config = small(segment_bytes=1 << 20, **buffer)
        self.config = replace(made, policy=replace(made.policy, path=str(run_dir / "policy")))
        dump(self.config, run_dir / "config.yaml")
        self.world = World(run_dir / "journal", self.config, segment_bytes=segment_bytes)
        self.lineage = self.world.resume()
        self.rows = JsonlWriter(run_dir / "metrics.jsonl")
        self.takes = 0
        self.version = 0

    def trajectory(
        self, ticket: Ticket, member: int, texts: list[str], *, guided: bool = False
    ) -> Trajectory:
        """A prompt, then a turn for each text with an observation after it."""
        parts = [(Role.PROMPT, -1, "you are here")]
        if guided:
            parts.append((Role.EXPERIENCE, -1, "go left first"))
        for turn, text in enumerate(texts):
            parts += [(Role.ACTION, turn, text), (Role.OBSERVATION, -1, " next")]
        encoded = [(role, turn, self.encode(text)) for role, turn, text in parts]
        tokens = np.concatenate([ids for _, _, ids in encoded])
        roles = np.concatenate([np.full(len(ids), role, np.uint8) for role, _, ids in encoded])
        turns = np.concatenate([np.full(len(ids), turn, np.int16) for _, turn, ids in encoded])
        action = roles == Role.ACTION
        logprobs = np.where(action, -0.25 * (np.arange(len(tokens)) % 5), 0).astype(np.float32)
        head = self.world.replay.at.head
        assert head is not None
        runs = [VersionRun(weights=head, tokens=int(action.sum()))]
        sequence = Sequence(
            tokens=tokens, roles=roles, turns=turns, logprobs=logprobs, versions=runs
        )
        count = len(texts)
        return episode(
            sequence,
            group_id=ticket.group_id,
            member=member,
            attempt=ticket.attempt,
            reward=float(member),
            success=member > 0,
            turn_rewards=np.arange(count, dtype=np.float32),
            turn_flags=np.arange(count, dtype=np.uint8) % 4,
            labels=(np.arange(count) % 3 - 1).astype(np.int8),
            label_source="judge",
            experience_ids=[7] if guided else [],
            timing={"total_s": 0.5},
        )

    def encode(self, text: str) -> np.ndarray:
        return np.array(self.tokenizer.encode(text, add_special_tokens=False), np.int32)

    def group(self, texts: list[str], *, guided: bool = False) -> int:
        """Finish a group of two members with these turns; the first one may be guided."""
        (ticket,) = self.world.lease()
        for member in ticket.members:
            made = self.trajectory(ticket, member, texts, guided=guided and member == 0)
            assert isinstance(
                self.world.one("actor-0", messages.Push(trajectory=made)), messages.Ack
            )
        return ticket.group_id

    def step(self, *texts: str, filtered: str = "") -> list[int]:
        """Train a take of two new groups, or let `filtered` be the fate of the second one."""
        for _ in range(2):
            self.group(list(texts) or ["left", "right"], guided=True)
        return self.train(filtered)

    def train(self, filtered: str = "") -> list[int]:
        """Train the take that comes next, and write its row."""
        groups = self.world.sample(self.takes, self.lineage)
        ids = [group.group_id for group in groups]
        kept = ids[:1] if filtered else ids
        self.version += 1
        left_out = {filtered: ids[1:]} if filtered else {}
        self.world.done(self.takes, kept, self.version, self.lineage, left_out)
        self.takes += 1
        rewards = [one.reward for group in groups for one in group.trajectories]
        self.log(
            stage=0.0,
            stage_kind="rl",
            version=float(self.version),
            time_s=float(self.takes),
            **{"train/reward_mean": float(np.mean(rewards)), "train/success": 0.5},
            **{"loss/policy": 0.1, "time/train_s": 1.0, "time/forward_s": 0.4},
        )
        return ids

    def log(self, **values: Any) -> None:
        self.rows.write({"step": self.takes, "lineage": self.lineage, **values})

    def go_back(self, take: int) -> None:
        """Start the learner again from the checkpoint before `take`, whose version is the same."""
        self.lineage = self.world.resume(self.lineage, take, take, process=f"learner-{take}")
        self.takes = self.version = take

    def measure(self, trajectory: Trajectory, step: int) -> None:
        """Write the line of a trajectory in samples/."""
        count = trajectory.action_tokens
        line = {
            "trajectory": trajectory.trajectory_id,
            "stripped": True,
            "ratios": [1.5] * count,
            "advantages": [-0.5] * count,
            "anchor_logprobs": [-0.1] * count,
        }
        (self.run_dir / "samples").mkdir(exist_ok=True)
        path = self.run_dir / "samples" / f"step_{step:06d}.jsonl"
        path.write_text(json.dumps(line) + "\n")

    def close(self) -> None:
        self.world.store.journal.close()
        self.rows.close()
