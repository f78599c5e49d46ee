"""First data of a stage: one sentence if nothing can be learned from them.

It looks at the rollouts of the first two steps as they arrive, so that it also speaks where dynamic
sampling leaves out all groups and no step is ever made. In memory only: a run that has begun is not
judged again after a restart.
"""

from dataclasses import dataclass, field

from evolver_async.config import Config
from evolver_async.rewards import EQUAL
from evolver_async.schema import Trajectory, TurnFlag

ENOUGH = 32  # episodes from which on one step's data are judged
MOST, NEARLY_ALL = 0.5, 0.9


@dataclass
class FirstSums:
    """FirstSums over the episodes of complete and incomplete groups, and over complete groups."""

    episodes: int = 0
    successes: int = 0
    turns: int = 0
    cut: int = 0  # turns
    unread: int = 0  # turns
    least: float = float("inf")  # reward
    largest: float = float("-inf")  # reward
    least_earned: float = float("inf")  # reward without the penalties of `rollout`
    largest_earned: float = float("-inf")
    groups: int = 0
    alike: int = 0  # groups whose members have equal rewards


@dataclass
class FirstData:
    """Judge of the first data of every stage. `stages`: their configurations; `begun`: stage of a
    run that has trained before, which is not judged."""

    stages: list[Config]
    begun: int = -1
    stage: int = -1
    sums: FirstSums = field(default_factory=FirstSums)
    warned: bool = False  # of refills

    def arrive(self, stage: int, trajectory: Trajectory, spread: float | None) -> str:
        """Add an episode of a rollout; return a sentence if nothing can be learned, else "".

        `spread`: that of the rewards of its group if it is complete now, else None.
        """
        if stage != self.stage:
            self.stage, self.sums, self.warned = stage, FirstSums(), False
        if stage == self.begun:
            return ""
        settings = self.stages[stage]
        self._add(settings, trajectory)
        if spread is None:
            return ""
        self.sums.groups += 1
        self.sums.alike += spread <= EQUAL
        least = 2 * settings.learner.groups_per_step
        if self.sums.episodes >= ENOUGH:
            least //= 2
        if self.sums.groups < least:
            return ""
        sentence = nothing_to_learn(settings, self.sums)
        if sentence or self.sums.groups >= 2 * settings.learner.groups_per_step:
            self.begun = stage
        return sentence

    def refill(self, stage: int, left_out: int, limit: int) -> str:
        """Return a sentence, once a stage, if dynamic sampling has used half of its refills."""
        if self.warned or stage != self.stage or 2 * left_out < limit:
            return ""
        self.warned = True
        return (
            f"dynamic sampling left out {left_out} groups with equal rewards since the last step;"
            f" after {limit} the run ends (selection.max_refills)"
        )

    def _add(self, settings: Config, trajectory: Trajectory) -> None:
        sums, rollout = self.sums, settings.rollout
        flags = [TurnFlag(flag) for flag in trajectory.turn_flags.tolist()]
        wrong = sum(
            bool(flag & (TurnFlag.FORMAT_ERROR | TurnFlag.INVALID_ACTION)) for flag in flags
        )
        earned = trajectory.reward - rollout.format_penalty * wrong
        earned -= 0.0 if trajectory.terminated else rollout.truncated_reward
        sums.episodes += 1
        sums.successes += trajectory.success
        sums.turns += len(flags)
        sums.cut += sum(TurnFlag.CUT in flag for flag in flags)
        sums.unread += sum(TurnFlag.FORMAT_ERROR in flag for flag in flags)
        # of several players, whose mean can be the same always, each counts
        own = [one.reward for one in trajectory.players] or [trajectory.reward]
        sums.least, sums.largest = min(sums.least, *own), max(sums.largest, *own)
        own = own if trajectory.players else [earned]
        sums.least_earned = min(sums.least_earned, *own)
        sums.largest_earned = max(sums.largest_earned, *own)


def nothing_to_learn(settings: Config, sums: FirstSums) -> str:
    """Return the reason why these episodes teach nothing, and the key that helps; "" if they
    may teach something."""
    rollout, kind, count = settings.rollout, settings.advantage.facts, sums.episodes
    cut, unread = sums.cut / max(1, sums.turns), sums.unread / max(1, sums.turns)
    first = f"of the first {count} episodes"
    none = f"none {first} succeeded"
    if cut >= (NEARLY_ALL if sums.successes else MOST):
        unreadable = f", {unread:.0%} cannot be read as rollout.format={rollout.format}"
        unreadable = unreadable if unread >= MOST else ""
        so = none if not sums.successes else f"{sums.successes} {first} succeeded"
        return (
            f"{cut:.0%} of the replies are cut at rollout.max_tokens={rollout.max_tokens}"
            f"{unreadable}, and {so}: raise rollout.max_tokens"
        )
    if unread >= NEARLY_ALL and not sums.successes:
        return (
            f"{unread:.0%} of the turns cannot be read as rollout.format={rollout.format}, and"
            f" {none}: choose another rollout.format, or teach this one in an sft stage before"
        )
    judged = settings.judge.kind != "none" and kind.unlabelled
    if sums.largest_earned - sums.least_earned <= EQUAL and not judged:
        reward = f"the reward {sums.largest_earned:g}"
        if sums.successes == count:
            return (
                f"all {first} succeeded with {reward}: there is nothing left to learn; choose"
                " harder tasks (env.params, tasks.path)"
            )
        if sums.largest - sums.least > EQUAL:
            reward += " but for rollout.format_penalty or rollout.truncated_reward"
        return (
            f"no reply was rewarded: all {first} have {reward}, {sums.successes} succeeded; look"
            " at the first reply, choose easier tasks, a reward with more steps, or an sft stage"
        )
    compares = kind.compares and rollout.group_size > 1
    if sums.alike == sums.groups and compares and not judged:
        return (
            f"all rewards within a group are equal, in each of the first {sums.groups} groups, so"
            " that no reply is better than another: raise rollout.temperature or rollout.group_size"
        )
    if not sums.successes and sums.largest_earned > EQUAL:
        return (
            f"rewards above 0 (up to {sums.largest:g}), but {none}: what is rewarded is not what"
            " is wanted, or the tasks are too hard (env.params, tasks.path)"
        )
    return ""
