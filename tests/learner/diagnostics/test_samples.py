"""Samples and histograms of a step against its groups."""

import json
import os
from pathlib import Path

import numpy as np
from collated_groups import collated, make_groups

from evolver_async.config import AdvantageConfig, LossConfig
from evolver_async.schema import Role
from learner.advantage.assign import Advantages
from learner.advantage.shaped_rewards import rewards_of
from learner.data.batch import LogProbs
from learner.data.selection import Selected
from learner.diagnostics.measure import Credit, Trained, step_histograms
from learner.diagnostics.step_rows import drop_oldest, write_samples
from learner.loss.accounting import Accounting
from learner.state import LearnerState


class Spelling:
    """Tokenizer whose texts are the token ids."""

    def decode(self, tokens: list[int]) -> str:
        return "".join(f"<{token}>" for token in tokens)


def trained(seed: int) -> Trained:
    groups = make_groups(seed, 3, 4)
    batch = collated(groups)
    zeros = np.zeros_like(batch.mu_N)
    none_P = np.zeros_like(batch.stripped_P)
    rewards = rewards_of(batch, LogProbs(zeros, zeros, zeros), LossConfig(), AdvantageConfig())
    advantages = Advantages(zeros, zeros, ~none_P, set(), 0.0)
    credit = Credit(LogProbs(zeros, batch.mu_N, zeros), None, rewards, advantages, none_P)
    return Trained("rl", groups, groups, Selected(groups, {}), batch, credit=credit)


def test_a_sample_has_the_turn_of_every_part_and_the_versions_of_every_turn(tmp_path: Path) -> None:
    for seed in range(5):
        data = trained(seed)
        path = tmp_path / "samples" / f"{seed}.jsonl"
        write_samples(path, Spelling(), data, 4)
        by_id = {t.trajectory_id: t for group in data.chosen.groups for t in group.trajectories}
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        assert lines and [one.name for one in path.parent.glob(".*")] == []
        for line in lines:
            one = by_id[line["trajectory"]]
            assert len(line["turn_versions"]) == len(one.turn_rewards)
            spoken = [""] * len(one.turn_rewards)
            versions: list[set[str]] = [set() for _ in spoken]
            for sequence in one.sequences:
                weights = [str(run.weights) for run in sequence.versions for _ in range(run.tokens)]
                action = np.flatnonzero(sequence.roles == Role.ACTION)
                for place, token in enumerate(action):
                    turn = int(sequence.turns[token])
                    spoken[turn] += f"<{sequence.tokens[token]}>"
                    versions[turn] |= {weights[place]} if weights else set()
            found = [""] * len(spoken)
            for (role, text), turn in zip(line["text"], line["text_turns"], strict=True):
                found[turn] += text if role == "ACTION" else ""
            assert found == spoken
            assert [set(names) for names in line["turn_versions"]] == versions


def test_histograms_count_every_trajectory_and_every_token() -> None:
    data = trained(0)
    accounting = Accounting()
    count = len(data.batch.mu_N)
    rng = np.random.default_rng(0)
    flags = np.zeros(count, bool)
    for part in (slice(0, count // 2), slice(count // 2, count)):
        accounting.add_tokens(
            lag_N=data.batch.lag_N[part],
            stripped_N=flags[part],
            swapped_N=flags[part],
            w_N=rng.lognormal(size=count)[part],
            r_N=rng.lognormal(size=count)[part],
            log_rho_N=np.zeros(count)[part],
            log_moved_N=np.zeros(count)[part],
            clipped_low_N=flags[part],
            clipped_high_N=flags[part],
            masked_N=flags[part],
        )
    kept_P = data.batch.length_P > 0
    found = step_histograms(data.batch, kept_P, accounting)
    totals = {name: sum(one.counts) for name, one in found.items()}
    kept = int(kept_P.sum())
    assert totals == {
        "rewards": kept, "lengths": kept, "lags": kept, "weights": count, "ratios": count
    }  # fmt: skip
    assert step_histograms(data.batch, kept_P).keys() == {"rewards", "lengths"}


def test_a_take_counts_its_turns_and_its_trained_tokens() -> None:
    state, groups = LearnerState(), make_groups(0, 3, 4)
    state.count(groups, 5, 1)
    state.count(groups, 7, 1)
    turns = sum(len(one.turn_rewards) for group in groups for one in group.trajectories)
    assert (state.take, state.stage_tokens) == (2, 12)
    assert state.progress() == {"progress/env_steps": 2.0 * turns, "progress/tokens": 12.0}
    for total in (7.0, 9.0, 8.0):  # a smaller total sets nothing back
        state.count_explorations({"questioning/explored_turns": total})
    state.count_explorations({})
    assert state.progress()["progress/env_steps"] == 2.0 * turns + 9.0
    for group in groups:
        group.use = 1
    state.count(groups, 5, 1)
    assert state.progress()["progress/env_steps"] == 2.0 * turns + 9.0, "they were played once"


def test_samples_beyond_their_bound_are_dropped_by_the_time_of_writing(tmp_path: Path) -> None:
    written = ("step_000010", "step_000300", "step_000020", "step_000100")  # 300: before a rollback
    for moment, name in enumerate(written):
        path = tmp_path / f"{name}.jsonl"
        path.write_bytes(b"x" * 100)
        os.utime(path, (moment, moment))
    for limit, kept in ((400, 4), (399, 3), (200, 2), (50, 1)):
        drop_oldest(tmp_path, limit)
        names = {path.stem for path in tmp_path.iterdir()}
        assert names == set(written[len(written) - kept :])
