"""Episodes that somebody else has recorded: conversations of files, as the policy would have had
them.

The context of every turn is what the chat template writes for the messages before it, the turn is
what the template adds for the assistant's message, up to the token that ends turns: tokens that the
policy itself would have been shown, and would have had to write. A template that changes earlier
turns (one that drops their thoughts) gives each turn a context of its own, as in an episode.
Trajectories of logs have tokens already: they only have to be this policy's.
"""

import json
import logging
from functools import cached_property
from typing import Any, NamedTuple

from actors.endpoint.request import ChatMessage
from actors.endpoint.template import Template
from actors.endpoint.tools import ChatToolCall
from actors.engines.engine import Generation
from actors.formats.chat import Chat, Stream
from actors.rollout.episode_config import Setting, setting_of
from actors.rollout.finished import Deliver, Finished, assembled
from actors.ticket_progress import TicketProgress
from evolver_async.buffer.tasks.data_files import ROWS, DataTasks
from evolver_async.buffer.tasks.examples import THOUGHTS, RowExample, examples_of
from evolver_async.buffer.tasks.logged import is_trajectory, trajectory_of
from evolver_async.config import Config, ConfigError
from evolver_async.model.tokenizer import load_tokenizer, vocabulary_hash
from evolver_async.schema import REWARD_ROUNDING, Group, Policy, Role, Sampling, Sequence, Ticket

log = logging.getLogger(__name__)

ASKED = {"role": "user", "content": ""}
THOUGHT = "<think>\n{}\n</think>\n\n"  # where a template writes none


class RowLeftOut(ValueError):
    """A row that cannot be learnt. `reason`: of all rows alike, in a few words."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


class RowMember(NamedTuple):
    """A member of a group that a row makes. `turn_rewards`: one a turn; None: all with the last."""

    policy: Policy
    sequences: list[Sequence]
    reward: float
    success: bool
    turn_rewards: list[float] | None = None


class ConversationRenderer:
    """Renderer of recorded conversations and trajectories for the policy of one stage."""

    def __init__(self, chat: Chat, stage: Config) -> None:
        self.columns = stage.data.columns
        self._chat = chat
        self._template = Template(chat)
        self._max_length = stage.policy.max_length
        self._turns = stage.data.turns
        self._system = stage.rollout.system_prompt
        self._policy = stage.policy.path
        self._max_reward = stage.safety.max_reward

    @cached_property
    def fingerprint(self) -> str:
        """Fingerprint of the policy's tokens."""
        return vocabulary_hash(self._policy)

    def members(self, row: dict[str, Any], kind: str) -> list[RowMember]:
        """Return the members that a row makes for a stage of this kind. Raise RowLeftOut."""
        try:
            if kind == "rl" and is_trajectory(row, self.columns):
                return [self._logged(row)]
            examples = examples_of(row, kind, self.columns)
        except RowLeftOut:
            raise
        except ValueError as error:
            raise RowLeftOut("not readable", str(error)) from None
        return [
            RowMember("recorded", self.sequences(one), one.reward, one.reward > 0)
            for one in examples
        ]

    def _logged(self, row: dict[str, Any]) -> RowMember:
        """Return the trajectory of a row. Raise ValueError, RowLeftOut if it is none of this
        policy's."""
        sequences, reward, success, turn_rewards = trajectory_of(row, self.columns)
        if (named := row.get("tokenizer")) is not None and named != self.fingerprint:
            detail = f"tokenizer {named}: the policy's is {self.fingerprint}"
            raise RowLeftOut("another tokenizer", detail)
        if (largest := max(int(one.tokens.max()) for one in sequences)) >= self._chat.vocabulary:
            known = f"the policy knows {self._chat.vocabulary}"
            raise RowLeftOut("beyond the vocabulary", f"token {largest}: {known}")
        self._check_length(max(map(len, sequences)))
        if (size := max(map(abs, (reward, *turn_rewards)))) > self._max_reward * REWARD_ROUNDING:
            limit = f"safety.max_reward is {self._max_reward:g}"
            raise RowLeftOut("reward too large", f"{size:g}: {limit}")
        return RowMember("logged", sequences, reward, success, turn_rewards)

    def _check_length(self, tokens: int) -> None:
        if tokens > self._max_length:
            limit = f"policy.max_length is {self._max_length}"
            raise RowLeftOut("too long", f"{tokens} tokens: {limit}")

    def sequences(self, example: RowExample) -> list[Sequence]:
        """Return the sequences of a conversation, or of a text. Raise RowLeftOut."""
        if example.text:
            return self._pieces(example.text)
        written = self._turns_of(example)
        found = list[Stream]()
        told = ""  # what the stream holds, as text
        for number, (context, turn) in enumerate(written):
            if found and context.startswith(told):
                found[-1].read(self._chat.tokens_of(context[len(told) :]), Role.OBSERVATION)
            else:
                found.append(Stream())
                found[-1].read(self._chat.whole_tokens(context), Role.PROMPT)
            tokens, last = self._chat.tokens_of(turn), self._chat.end_of_turn
            if last is not None and tokens[-1:] and tokens[-1] not in self._chat.stop_tokens:
                tokens.append(last)
            found[-1].write(_spoken(tokens), number)
            told = context + turn
        self._check_length(max(len(one.tokens) for one in found))
        return [one.sequence() for one in found]

    def _pieces(self, text: str) -> list[Sequence]:
        """Cut a text into contexts; of each the first token has nothing to be predicted from."""
        chat, most = self._chat, self._max_length
        tokens = chat.whole_tokens(chat.plain(text))
        tokens += [] if chat.end_of_text is None else [chat.end_of_text]
        pieces = []
        for number, start in enumerate(range(0, len(tokens), most)):
            stream = Stream()
            stream.write(_spoken(tokens[start : start + most]), number)
            pieces.append(stream.sequence())
        return pieces

    def _turns_of(self, example: RowExample) -> list[tuple[str, str]]:
        """Return the text before every turn that is learnt, and that of the turn."""
        said = example.messages
        if self._system and said[0].role != "system":
            said = [said[0]._replace(role="system", content=self._system, learnt=False), *said]
        converted = tuple(
            ChatMessage(
                one.role,
                one.content,
                tuple(ChatToolCall(name, json.dumps(given)) for name, given in one.calls),
            )
            for one in said
        )
        messages, tools = self._template.conversation(converted, example.tools)
        places = [place for place, one in enumerate(messages) if one["role"] == "assistant"]
        own = [one for one in said if one.role == "assistant"]
        wanted = list[int]()
        for place, one in zip(places, own, strict=True):
            if one.thought:
                messages[place] = self._with_thought(messages[place], self._chat.plain(one.thought))
            if one.learnt:
                wanted.append(place)
        if self._turns == "last":
            wanted = wanted[-1:]
        return [self._rendered(messages, place, tools) for place in wanted]

    def _with_thought(self, message: dict[str, Any], thought: str) -> dict[str, Any]:
        """Return the assistant's message with its thought where the template writes it."""
        for name in THOUGHTS:
            thinking = message | {name: thought}
            try:
                if thought in self._chat.render([ASKED, thinking], opens=False):
                    return thinking
            except Exception as error:  # templates raise exceptions of any kind
                log.debug("a template without %s: %s", name, error)
        return message | {"content": THOUGHT.format(thought) + message["content"]}

    def _rendered(
        self, messages: list[dict[str, Any]], place: int, tools: list[dict[str, Any]]
    ) -> tuple[str, str]:
        def rendered(some: list[dict[str, Any]], opens: bool) -> str:
            return self._chat.render(some, tools, opens=opens)

        try:
            before = rendered(messages[:place], True)
            after = rendered(messages[: place + 1], False)
            if after.startswith(before):
                turn = after[len(before) :]
            else:  # it changes what stands before it: harmony's drops a thought before its answer
                alone = rendered([ASKED, messages[place]], False)
                turn = alone.removeprefix(rendered([ASKED], True))
                if turn == alone:
                    raise ValueError("it writes no turn of the assistant behind its own opening")
            if (end := self._chat.end_of(turn)) is not None:
                return before, turn[:end]
            # what ends a turn can be the head of the message behind it
            behind = rendered(messages[: place + 2], False)
        except Exception as error:  # templates raise exceptions of any kind
            raise RowLeftOut("the chat template refuses it", str(error)) from None
        rest = behind[len(after) :] if behind.startswith(after) else ""
        ends = self._chat.mark(rest) in self._chat.stop_tokens
        return before, turn + (rest[: self._chat.end_of(rest)] if ends else "")


def _spoken(tokens: list[int]) -> Generation:
    return Generation(tokens=tokens, logprobs=[0.0] * len(tokens), weights=[], finish="stop")


def check_rendered(renderer: ConversationRenderer, tasks: DataTasks, kind: str) -> None:
    """Raise ConfigError, naming file and row, if none of the rows looked at can be learnt."""
    for split in ("train",) if kind == "rl" else ("train", "validation"):
        problem = ""
        for task in tasks.examples(split):
            try:
                renderer.members(task.row, kind)
                problem = ""
                break
            except RowLeftOut as left_out:
                problem = problem or f"{task.task_id}: {left_out}"
        if problem:
            none = f"no row of the split {split} that was looked at can be learnt"
            raise ConfigError(f"data.path: {none}, such as {problem}")


def held_out_groups(tasks: DataTasks, stage: Config, index: int, kind: str) -> list[Group]:
    """Make groups of at most `eval.rows` rows of the validation split, spread over it, as actors
    make them of rows that stage `index` of this kind trains on.

    One that cannot be learnt has nothing to train, as there, and is told in the log.
    """
    chat = Chat(load_tokenizer(stage.policy.path), stage.rollout.template)
    renderer, setting = ConversationRenderer(chat, stage), setting_of(stage, chat, "", 0)
    count, groups = tasks.count("validation"), list[Group]()
    most = min(stage.eval.rows, count)
    for number in range(most):
        task = tasks.task("validation", number * count // most)
        ticket = Ticket(
            group_id=number,
            task=task,
            kind="demo",
            stage=index,
            members=[*range(stage.rollout.group_size)],
            guided=[],
            dynamics_seed=0,
            attempt=0,
            weights=None,
            lease_s=0.0,
            sampling=Sampling(temperature=1.0, max_tokens=1),
        )
        finished = list[Finished]()
        deliver_row(ticket, setting, renderer, kind, TicketProgress(), finished.append)
        members = [one.trajectory for one in finished]
        groups.append(
            Group(group_id=number, task=task, kind="demo", stage=index, use=0, trajectories=members)
        )
    for left_out in setting.failures.totals():
        log.warning("rows held out of stage %d: %s", index, left_out)
    return groups


def deliver_row(
    ticket: Ticket,
    setting: Setting,
    renderer: ConversationRenderer,
    kind: str,
    progress: TicketProgress,
    deliver: Deliver,
) -> None:
    """Deliver the members that a row, or in an rl stage each row of a group, makes for a stage of
    this kind. What cannot be learnt is counted by its reason, and its members have nothing to
    train."""
    task = ticket.task
    if kind == "rl":
        made = [_made(one, setting, renderer, kind)[:1] for one in task.row[ROWS]]
        members = [member for found in made for member in found or [_nothing(1.0)]]
    else:
        members = _made((task.task_id, task.query, task.row), setting, renderer, kind)
        members = members or [_nothing(float(not index)) for index in range(2)]
    for member in ticket.members:
        deliver(_finished(ticket, member, setting, members[member]))
        progress.played += 1


def _made(
    row: tuple[str, str, dict[str, Any]],
    setting: Setting,
    renderer: ConversationRenderer,
    kind: str,
) -> list[RowMember]:
    """Return the members of a row, which is a place, a problem and columns; [] if it is left
    out."""
    place, problem, columns = row
    try:
        if problem:
            raise RowLeftOut("no JSON", problem)
        return renderer.members(columns, kind)
    except RowLeftOut as left_out:
        setting.failures.note("data", left_out.reason, f"{place}: {left_out}")
        return []


def _nothing(reward: float) -> RowMember:
    """Return a member without any token to train."""
    stream = Stream()
    stream.read([0], Role.PROMPT)
    return RowMember("recorded", [stream.sequence()], reward, reward > 0)


def _finished(ticket: Ticket, member: int, setting: Setting, made: RowMember) -> Finished:
    turns = 1 + max(int(one.turns.max()) for one in made.sequences)
    rewards = made.turn_rewards or [*[0.0] * (turns - 1), made.reward]
    finished = assembled(
        ticket,
        member,
        setting,
        made.policy,
        made.sequences,
        rewards=rewards if turns else [],
        flags=[0] * turns,
        outcome=(made.success, True),
        seconds=(0.0, 0.0, 0.0),
        turns=[],
        query="",
        content=ticket.task.task_id,
        instructions="",
        ending="",
        acted=[],
        tools=[],
        experience_ids=[],
        scores=[],
        metrics={},
    )
    if made.policy == "logged":  # an outcome can be more than the sum of its turns
        finished.trajectory.reward = made.reward
    return finished
