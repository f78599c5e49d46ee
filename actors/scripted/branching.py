"""Early experience: expert episodes with the outcomes of alternative turns.

A member of a branch ticket is one such state. In a world-model stage, what every turn led to is
learnt from the state and the turn; to reflect, the expert's turn is learnt together with a reason
why it is better than another one, written from what both led to. What is learnt has the role
ACTION, in one Sequence a row; nothing of it was sampled.
"""

import asyncio
import logging
import random
from dataclasses import replace
from typing import Literal, NamedTuple

import msgspec
import numpy as np

from actors.engines.engine import Generation
from actors.envs.base import Env, EnvironmentFailure, Rewindable, asynchronous
from actors.formats.turns import TurnFormat
from actors.llm.quoting import plain
from actors.rollout.environment import TimedEnvironment
from actors.rollout.episode import EpisodeLate
from actors.rollout.episode_config import Setting
from actors.rollout.episode_policy import EpisodePolicy
from actors.rollout.finished import Deliver, Finished
from actors.rollout.group import run_members
from actors.scripted.demonstrations import ScriptedPolicy, within_reference
from actors.scripted.reflection import Reflector
from actors.ticket_progress import TicketProgress
from evolver_async.config import StageConfig
from evolver_async.env import Step
from evolver_async.randomness import key
from evolver_async.schema import Role, Sequence, Ticket

log = logging.getLogger(__name__)

REASON = "{bad} then {bad_outcome} . {good} then {good_outcome} . choose {good}"
DONE, WON, LOST = "done", "success", "failed"  # how an outcome says that it is the last
CHARS = (400, 300, 200, 150, 100, 75, 50, 35, 25, 15, 8)  # of an outcome, until the turn fits


class TriedTurn(NamedTuple):
    """A turn that was tried: its actions, the policy's view of the outcome, and the ending if it
    ends the episode."""

    actions: list[str]
    shown: str
    ending: str

    @property
    def words(self) -> str:
        """Actions on one line."""
        return plain(" , ".join(self.actions))

    @property
    def outcome_text(self) -> str:
        return f"{self.shown} {self.ending}".strip() if self.ending else self.shown

    def outcome(self, chars: int) -> str:
        """Return the outcome on one line: the whole words among the first `chars` characters, and
        the ending."""
        shown = plain(self.shown)
        if len(shown) > chars:
            shown = shown[: chars + 1].rpartition(" ")[0]
        return f"{shown} {self.ending}".strip()


class BranchState(NamedTuple):
    """A state of the expert's episode: the policy's context, the expert's turn and alternatives."""

    turn: int
    context: list[int]
    expert: TriedTurn
    others: list[TriedTurn]


class BranchingPolicy(EpisodePolicy):
    """Policy that plays the expert's episode; in every state it tries the expert's turn and up to
    `alternatives` others with another first action."""

    kind: Literal["learned", "scripted"] = "scripted"

    def __init__(
        self,
        ticket: Ticket,
        member: int,
        setting: Setting,
        stage: StageConfig,
        progress: TicketProgress,
    ) -> None:
        self._progress = progress
        parts = ("branch", ticket.group_id, member, ticket.attempt)
        self._rng = random.Random(key(setting.seed, *parts))
        self._expert = ScriptedPolicy(ticket, member, setting, expert_fraction=1.0)
        self._ticket = ticket
        self._member = member
        self._setting = setting
        self._stage = stage
        self._written = 0  # actions of the turns before
        self.states: list[BranchState] = []

    async def write(self, world: TimedEnvironment, context: list[int], turn: int) -> Generation:
        expert = self._ticket.task.reference
        if expert and not restorable(world.env):
            state = self._state(turn, context, await self._tried_again(world, expert))
            self._written += self._setting.format.actions_per_turn
        else:
            state = await world.call("branching", self._branch, world.env, turn, context)
        if state is not None:
            self.states.append(state)
        return await self._expert.write(world, context, turn)

    def _branch(self, env: Env, turn: int, context: list[int]) -> BranchState | None:
        """Return the current state, of which snapshots are taken; None without room."""
        style, most, given = self._setting.format, self._stage.alternatives, None
        if reference := self._ticket.task.reference:
            given = reference[self._written :][: style.actions_per_turn]
            self._written += len(given)
        return self._state(turn, context, try_turns(env, style, most, self._rng, given))

    async def _tried_again(self, world: TimedEnvironment, expert: list[str]) -> list[TriedTurn]:
        """Try the expert's turn and others, each in an episode of its own that the expert's actions
        so far lead to: the environment cannot go back by itself, or is not here."""
        style, before = self._setting.format, expert[: self._written]
        own = expert[self._written :][: style.actions_per_turn]
        known = list(dict.fromkeys(expert))  # all that is known to exist where nothing lists them
        if (actions := getattr(world.env, "actions", None)) is not None:
            known = list(await world.call("actions", actions))
        turns = [own, *alternatives(own, known, self._stage.alternatives, self._rng)]
        return [await self._carried_out(before, turn) for turn in turns]

    async def _carried_out(self, before: list[str], turn: list[str]) -> TriedTurn:
        ticket, setting, done = self._ticket, self._setting, list[Step]()
        seed = key(ticket.dynamics_seed, self._member)
        limits = setting.step_timeout_s, self._progress, setting.failures, setting.idle
        async with TimedEnvironment(ticket, self._member, *limits, setting.isolation) as world:
            await world.open()
            await world.reset(ticket.task, seed)
            for action in before:
                await world.step(action, doing="replay")
            for action in turn:
                done.append(await world.step(action, doing="branching"))
                if done[-1].terminated or done[-1].truncated:
                    break
        return tried(turn, done, setting.format)

    def _state(self, turn: int, context: list[int], turns: list[TriedTurn]) -> BranchState | None:
        """Return the state in which these turns were tried, the expert's first; None if its rows do
        not fit in the context. At the first turn that is an error, because the episode would have
        no state."""
        setting, stage = self._setting, self._stage
        expert, *others = turns
        state = BranchState(turn, context, expert, others)
        if stage.kind == "reflect" or world_rows(state, setting):
            return state
        if turn == 0:
            limit = f"policy.max_length ({setting.max_length})"
            raise ValueError(f"{limit} leaves no room for what the first turn leads to")
        return None


def restorable(env: Env) -> bool:
    """Return True for an environment that goes back to a state by itself, without waiting."""
    return isinstance(env, Rewindable) and not asynchronous(env)


def alternatives(
    expert: list[str], actions: list[str], most: int, rng: random.Random
) -> list[list[str]]:
    """Draw at most `most` turns as long as the expert's, with different first actions."""
    different = {action.lower(): action for action in actions}  # some name one several times
    firsts = [action for name, action in different.items() if name != expert[0].lower()]
    firsts = rng.sample(firsts, min(most, len(firsts)))
    return [[first, *rng.choices(actions, k=len(expert) - 1)] for first in firsts]


def try_turns(
    env: Env, style: TurnFormat, most: int, rng: random.Random, expert: list[str] | None = None
) -> list[TriedTurn]:
    """Try the expert's turn, then at most `most` others, each from the current state, which
    is restored. `expert`: None is the environment's solution."""
    assert isinstance(env, Rewindable), f"{type(env).__name__} cannot be branched"
    expert = expert or env.solve()[: style.actions_per_turn]
    found = []
    for turn in (expert, *alternatives(expert, env.actions(), most, rng)):
        here, done = env.snapshot(), list[Step]()
        for action in turn:
            done.append(env.step(action))
            if done[-1].terminated or done[-1].truncated:
                break
        found.append(tried(turn, done, style))
        env.restore(here)
    return found


def tried(turn: list[str], steps: list[Step], style: TurnFormat) -> TriedTurn:
    """Return a turn with what its steps showed."""
    last = steps[-1]
    over = last.terminated or last.truncated
    ending = f"{DONE} {WON if last.info.success else LOST}" if over else ""
    valid = all(step.info.valid for step in steps)
    return TriedTurn(turn, style.shown([one.observation for one in steps], valid, ""), ending)


def chosen(states: list[BranchState], ticket: Ticket, member: int, seed: int) -> BranchState:
    """Return this member's state; members of a group have different ones as long as possible."""
    order = list(range(len(states)))
    random.Random(key(seed, "states", ticket.group_id)).shuffle(order)
    return states[order[member % len(order)]]


def world_rows(state: BranchState, setting: Setting) -> list[Sequence]:
    """Return rows that learn the outcome of every turn that was tried, after the state and the
    turn."""
    chat, style = setting.chat, setting.format
    rows = []
    for tried in (state.expert, *state.others):
        turn = chat.turn(style.render_actions(tried.actions), style.stop_strings)
        before, message = chat.message(tried.outcome_text)
        shown = [*state.context, *turn, *chat.behind(turn[-1], before)]
        room = setting.max_length - len(shown)
        if room > 0:
            rows.append(_row(shown, message[:room], state.turn))
    return rows


def reflect_rows(
    state: BranchState, setting: Setting, max_tokens: int, written: list[str | None] | None = None
) -> list[Sequence]:
    """Return rows that learn the expert's turn after the state, once for every alternative, with
    the reason why it is better; without a reason if there is no alternative.

    `written`: the reasons, where somebody wrote them; None among them, and nothing at all: those of
    the template. ValueError names `rollout.max_tokens` where a turn with a reason does not fit.
    """
    answer = setting.format.render_actions(state.expert.actions)
    reasons = written or [None for _ in state.others]
    versions = [
        [reason(state.expert, other, chars) for chars in CHARS] if text is None else _shorter(text)
        for other, text in zip(state.others, reasons, strict=True)
    ]
    plain_text = setting.chat.plain
    turns = [[f" {plain_text(text)} {answer}" for text in texts] for texts in versions]
    turns = turns or [[answer]]
    learnt = [_fitting(texts, setting, max_tokens) for texts in turns]
    return [_row(state.context, turn, state.turn) for turn in learnt]


def reason(expert: TriedTurn, other: TriedTurn, chars: int) -> str:
    """Write why the expert's turn is better: both outcomes, each in at most `chars` characters."""
    return REASON.format(
        bad=other.words,
        bad_outcome=other.outcome(chars),
        good=expert.words,
        good_outcome=expert.outcome(chars),
    )


def _shorter(text: str) -> list[str]:
    """Return a text, then ever shorter beginnings of whole words."""
    lengths = [chars for chars in CHARS if chars < len(text)]
    return [text, *(text[: chars + 1].rpartition(" ")[0] or text[:chars] for chars in lengths)]


def _fitting(texts: list[str], setting: Setting, max_tokens: int) -> list[int]:
    """Return the tokens of the first text that fits in a turn."""
    turn: list[int] = []
    for text in texts:
        turn = setting.chat.turn(text, setting.format.stop_strings)
        if len(turn) <= max_tokens:
            return turn
    small = f"is too small for a turn with a reason: {len(turn)} tokens"
    raise ValueError(f"rollout.max_tokens: {max_tokens} {small}")


def _row(shown: list[int], learnt: list[int], turn: int) -> Sequence:
    length = len(shown) + len(learnt)
    roles, turns = np.full(length, Role.PROMPT, np.uint8), np.full(length, -1, np.int16)
    roles[len(shown) :], turns[len(shown) :] = Role.ACTION, turn
    return Sequence(
        tokens=np.array([*shown, *learnt], np.int32),
        roles=roles,
        turns=turns,
        logprobs=np.zeros(length, np.float32),
        versions=[],
    )


async def branch_group(
    ticket: Ticket,
    setting: Setting,
    stage: StageConfig,
    progress: TicketProgress,
    deliver: Deliver,
    reflector: Reflector | None = None,
) -> None:
    """Run a branch ticket's members; each trajectory is the expert's episode, with the rows of one
    of its states in place of its tokens.

    An EnvironmentFailure, else an EpisodeLate, is raised after all the others were delivered.
    """
    setting = within_reference(ticket, setting)
    policies: dict[int, BranchingPolicy] = {}
    done: list[Finished] = []
    failures: list[EnvironmentFailure | EpisodeLate] = []

    def policy_of(member: int) -> EpisodePolicy:
        policies[member] = BranchingPolicy(ticket, member, setting, stage, progress)
        return policies[member]

    async def hand_over(finished: Finished) -> None:
        member = finished.trajectory.member
        state = chosen(policies[member].states, ticket, member, setting.seed)
        if stage.kind == "world_model":
            rows = world_rows(state, setting)
        else:
            with progress.during(member, "reflecting"):
                written = await _written(state, setting, reflector, progress)
            try:
                rows = reflect_rows(state, setting, ticket.sampling.max_tokens, written)
            except ValueError as error:
                where = f"task {ticket.task.task_id}, member {member}"
                failed = EnvironmentFailure(ticket.task.env, where, "reflecting", error)
                log.warning("group %d: %s", ticket.group_id, failed)
                setting.failures.note(failed.kind, failed.name, failed.error)
                failures.append(failed)
                return
        trajectory = msgspec.structs.replace(finished.trajectory, sequences=rows)
        deliver(replace(finished, trajectory=trajectory))

    try:
        await run_members(ticket, setting, policy_of, progress, done.append)
    except (EnvironmentFailure, EpisodeLate) as error:
        failures.append(error)
    async with asyncio.TaskGroup() as group:
        for finished in done:
            group.create_task(hand_over(finished))
    if failures:
        raise min(failures, key=lambda failure: isinstance(failure, EpisodeLate))


async def _written(
    state: BranchState, setting: Setting, reflector: Reflector | None, progress: TicketProgress
) -> list[str | None] | None:
    """Return the reasons that a model writes, one for every alternative; None without a model."""
    if reflector is None:
        return None
    situation = setting.chat.last_message(state.context, setting.format.prefix)

    async def write(other: TriedTurn) -> str | None:
        expert = state.expert.words, state.expert.outcome_text
        text = await reflector.reason(situation, expert, (other.words, other.outcome_text))
        progress.count += 1
        return text

    return await asyncio.gather(*map(write, state.others))
