"""Token-in, token-out conversation: the chat template, rendered message by message.

A conversation only grows. `first` gives the tokens up to where the policy begins to write, `next`
those between the end of its turn and the beginning of the next. Between them stands what was
sampled, token for token, never tokenised again. Where a template would rewrite earlier turns
(dropping their thoughts, say), this is not followed: the model sees what it wrote.

What an environment or the experience pool says is data: where it spells a special token, or a
marker of experience, it is written so that no tokenizer takes it for one.
"""

import inspect
from array import array
from collections.abc import Iterable, Mapping
from datetime import datetime
from functools import lru_cache
from itertools import takewhile
from typing import Any, NamedTuple

import numpy as np

from actors.engines.engine import Generation
from actors.formats.tags import THOUGHT
from evolver_async.files import parsed
from evolver_async.model.tokenizer import end_tokens
from evolver_async.schema import Role, Sequence, VersionRun, WeightId

ASSISTANT, USER, SYSTEM = "assistant-sentinel", "user-sentinel", "system-sentinel"
OPENING, CLOSING = "<experience>", "</experience>"
REMEMBERED = 4096  # texts whose tokens are kept: observations repeat, and members share a prompt
LONGEST = 1000  # characters of a text whose tokens are kept
LONGEST_TURN = 32  # tokens of a turn whose text is kept: short ones repeat
Messages = tuple[tuple[str, str], ...]  # roles and texts
# For templates that write the date: every day has the same prompts. Llama's fall back to this one.
TODAY = datetime(2024, 7, 26)


class Chat:
    """Conversation format of one tokenizer.

    `end_of_turn` is the token that the template puts behind the last message of the assistant, or
    else the one that heads the next message (None where that is not one special token);
    `stop_tokens` are those whose sampling ends a turn. `between` is the text between an assistant
    message and the next one of the user, `opening` that between the latter and where the policy
    writes. ValueError: the template drops or changes messages.

    `switches`: variables of the template, such as `enable_thinking`; ValueError for one that is not
    its own (`reserved`). Without a text for it there is no system message, so a template's own
    default acts. A template without a system role has the text in front of the first message of
    the user.
    """

    def __init__(self, tokenizer: Any, switches: Mapping[str, Any] | None = None) -> None:
        self._tokenizer = tokenizer
        # Without offsets and by itself it takes two thirds of the time that `encode` takes.
        self._backend = tokenizer.backend_tokenizer
        self._backend.no_truncation()
        self._backend.no_padding()
        self.switches = dict(switches or {})
        parameters = inspect.signature(tokenizer.apply_chat_template).parameters
        self.reserved = frozenset((*parameters, "strftime_now", "forced_prefix"))
        for name in self.switches:
            if name in self.reserved or not name.isidentifier():
                raise ValueError(f"chat template: {name} cannot be set (rollout.template)")
        self._guard: tuple[str, int] | None = None
        self._remembered = lru_cache(REMEMBERED)(self._encode)
        self._openings = lru_cache(REMEMBERED)(self._rendered_opening)
        self._texts = lru_cache(REMEMBERED)(self._decode)
        added = tokenizer.added_tokens_decoder.values()
        self._reserved = [token.content for token in added if token.special]
        self._reserved += [OPENING.removesuffix(">"), CLOSING.removesuffix(">")]
        history = [{"role": "user", "content": ""}, {"role": "assistant", "content": ASSISTANT}]
        rendered = self.render([*history, {"role": "user", "content": USER}])
        _, found, after = rendered.partition(ASSISTANT)
        self.between, found_too, self.opening = after.partition(USER)
        if not (found and found_too):
            raise ValueError("chat template: it does not render every message as it is")
        self._head = self._rendered([("user", USER)]).partition(USER)[0]
        try:
            self._has_system = SYSTEM in self._rendered([("system", SYSTEM), ("user", "")])
        except Exception:  # jinja's, for which the template can have any reason
            self._has_system = False
        eos: int | None = tokenizer.eos_token_id
        self.end_of_text = eos
        self.stop_tokens = frozenset(() if eos is None else (eos,))
        if tokenizer.name_or_path:  # the directory of its model
            self.stop_tokens |= end_tokens(tokenizer.name_or_path)
        self._marks = {*self.stop_tokens, *tokenizer.added_tokens_decoder}
        # A template can close a message in another way than the last one, at whose end the model
        # stops: behind a thought of harmony's comes <|end|>, behind the answer <|return|>.
        texts = self._behind_last(history), self.between, self.opening
        closing, ending, opening = (self._mark(self.tokens_of(text)) for text in texts)
        if closing == opening != ending:
            closing = None  # the head of the next turn, from a template that always opens it
        # The message behind another one can begin with its own head instead. That does not close
        # the user's message too, or it begins the conversation.
        heads = {*takewhile(self._marks.__contains__, self.tokens_of(rendered))}
        closes = ending == closing or (ending == opening and ending not in heads)
        self._closing = ending if closing is not None and closes else None
        self.end_of_turn = ending if closing is None else closing
        self._check_pieces(rendered)
        if self.end_of_turn is not None:
            self.stop_tokens |= {self.end_of_turn}

    def _check_pieces(self, rendered: str) -> None:
        """Compare a conversation that is put together of pieces with the whole. SentencePiece's
        tokenizers begin each text with a space; behind a special token, which `_encode` then drops
        again, some do not. ValueError if there is no such token."""
        before, _, after = rendered.partition(ASSISTANT)
        whole = self._decode(self.whole_tokens(rendered))
        specials = [name for name in self._tokenizer.all_special_tokens if name]
        for guard in ("", *specials):
            if guard:
                self._guard = guard, len(self.whole_tokens(guard))
                self._remembered.cache_clear()
            parts = self.whole_tokens(before), self.tokens_of(ASSISTANT), self.tokens_of(after)
            if self._decode(token for part in parts for token in part) == whole:
                return
        raise ValueError(
            "tokenizer: pieces of a conversation, each tokenized by itself, read as another text"
            " than the whole: a space or a mark is added where a piece begins or ends"
        )

    def _behind_last(self, history: list[dict[str, Any]]) -> str:
        """Return the text behind the assistant's message at the end of a conversation; "" from a
        template that refuses to end there."""
        try:
            rendered = self.render(history, opens=False)
        except Exception:
            return ""
        return rendered.partition(ASSISTANT)[2]

    @property
    def vocabulary(self) -> int:
        """Number of tokens, added ones included."""
        return len(self._tokenizer)

    @property
    def opens_thought(self) -> bool:
        """True if the template opens a thought where the policy writes."""
        return self.opening.rstrip().endswith(THOUGHT)

    @property
    def template(self) -> str:
        """Source of the chat template."""
        return self._tokenizer.get_chat_template()

    def first(
        self, system: str, user: str, prefix: str, before: Messages = (), tools: str = ""
    ) -> list[int]:
        """Return the tokens of the first prompt, up to and including the forced `prefix`.

        `before`: messages between the system's and the last one of the user; `tools`: a list in
        JSON for the template.
        """
        opening = self.whole_tokens(self._opening_text(system, user, before, tools))
        return opening + self.tokens_of(prefix)

    def place_of_user(self, system: str, user: str, before: Messages = (), tools: str = "") -> int:
        """Count the tokens of `first` before the last message of the user."""
        text = self._opening_text(system, user, before, tools)
        # The last of them, since `system` may spell the placeholder too.
        ahead, found, _ = self._opening_text(system, USER, before, tools).rpartition(USER)
        if not found or not text.startswith(ahead):
            raise ValueError("chat template: what precedes the user's message depends on it")
        offsets = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        ends = [end for _, end in offsets["offset_mapping"]]
        return next((i for i, end in enumerate(ends) if end > len(ahead)), len(ends))

    def opening_messages(
        self, system: str, user: str, before: Messages = ()
    ) -> list[tuple[str, str]]:
        """Return roles and texts of the first messages, as the template takes them."""
        said = [*before, ("user", user)]
        if system and self._has_system:
            return [("system", system), *said]
        if system:
            place = next(i for i, (role, _) in enumerate(said) if role == "user")
            said[place] = ("user", f"{system}\n\n{said[place][1]}")
        return said

    def supported(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return messages without the system's role if the template has none: what the system says
        first stands in front of the first message of the user."""
        if self._has_system or not messages or messages[0]["role"] != "system":
            return messages
        said, *rest = messages
        place = next((i for i, one in enumerate(rest) if one["role"] == "user"), None)
        if place is None:
            return messages
        asked = rest[place]
        rest[place] = asked | {"content": f"{said['content']}\n\n{asked['content']}"}
        return rest

    def experience(self, text: str) -> list[int]:
        """Return the tokens of guidance between its markers, by themselves."""
        return [token for part in self.experience_parts(text) for token in self.tokens_of(part)]

    def experience_parts(self, text: str) -> tuple[str, str, str]:
        """Return guidance as text: its opening marker, what it says, its closing marker."""
        return f"{OPENING}\n", self.plain(text), f"\n{CLOSING}\n"

    def plain(self, text: str) -> str:
        """Change `text` so that nothing in it spells a special token or a marker of experience."""
        # Repeated until nothing is found: replacing one name can spell another.
        text, found = encodable(text), True
        while found:
            found = False
            for name in self._reserved:
                if name in text:
                    found = True
                    text = text.replace(name, f"{name[0]} {name[1:]}" if name[1:] else "")
        return text

    def plain_value(self, value: Any) -> Any:
        """Change all texts in a value of JSON as `plain` does."""
        if isinstance(value, str):
            return self.plain(value)
        if isinstance(value, list):
            return [self.plain_value(item) for item in value]
        if isinstance(value, dict):
            return {self.plain_value(name): self.plain_value(item) for name, item in value.items()}
        return value

    def shortened(self, text: str, limit: int) -> tuple[str, bool]:
        """Return a text of at most `limit` tokens, and True if it is not `text`.

        It has the beginning and the end of `text`, and between them a note of the number of tokens
        that are left out. 0: no limit.
        """
        if not limit or len(text.encode(errors="replace")) <= limit:  # no token is shorter
            return text, False
        whole = self.plain(text)
        encoded = self._tokenizer(whole, add_special_tokens=False, return_offsets_mapping=True)
        offsets: list[tuple[int, int]] = encoded["offset_mapping"]
        count = kept = len(offsets)
        made, over = whole, count - limit
        while over > 0 and kept > 2:
            kept = max(2, kept - over)
            begin, end = offsets[kept - kept // 2 - 1][1], offsets[count - kept // 2][0]
            note = f"\n[... {count - kept} of {count} tokens left out ...]\n"
            made = whole[:begin] + note + whole[end:]
            over = len(self._encode(self.plain(made))) - limit
        return (made, True) if kept < count else (text, False)

    def next(self, user: str, prefix: str, last: int | None) -> list[int]:
        """Return the tokens from the end of the policy's turn, its token `last`, to the beginning
        of its next."""
        tokens = self.tokens_of(self.between + self.plain(user) + self.opening)
        return self.behind(last, tokens) + self.tokens_of(prefix)

    def behind(self, last: int | None, tokens: list[int]) -> list[int]:
        """Return the template's tokens behind a turn with the last token `last`. If that has ended
        the turn, the template's end token is left out, with the blanks before it: no turn ends
        twice."""
        mark = self._mark(tokens)
        if last in self.stop_tokens and mark is not None and mark in (last, self._closing):
            return tokens[tokens.index(mark) + 1 :]
        return tokens

    def _mark(self, tokens: list[int]) -> int | None:
        """Return the special token that the tokens begin with, behind blanks too; None without."""
        for place, token in enumerate(tokens):
            if token in self._marks:
                return None if self._decode(tokens[:place]).strip() else token
        return None

    def mark(self, text: str) -> int | None:
        """Return the special token that a text of the template begins with, behind blanks too;
        None without one."""
        return self._mark(self.tokens_of(text))

    def stop_at(self, token: int | None) -> None:
        """Have this token end turns too."""
        self.stop_tokens |= frozenset(() if token is None else (token,))

    def end_of(self, text: str) -> int | None:
        """Return the place in a text of the template behind the first token that ends turns, None
        without one."""
        names = [self._tokenizer.convert_ids_to_tokens(token) for token in self.stop_tokens]
        ends = [(text.find(name), len(name)) for name in names if name in text]
        return sum(min(ends)) if ends else None

    def until_stop(self, text: str) -> str:
        """Return a text of the template up to the first token that ends turns."""
        tokens = self.tokens_of(text)
        return self._decode(takewhile(lambda token: token not in self.stop_tokens, tokens))

    def message(self, user: str) -> tuple[list[int], list[int]]:
        """Return the tokens that `next` has before the user's message, and those of the message
        with the one that ends it."""
        said = self.plain(user)
        guard, count = self._guard or ("", 0)
        text, options = self.between + said + self.opening, {"return_offsets_mapping": True}
        encoded = self._tokenizer(guard + text, add_special_tokens=False, **options)
        tokens, offsets = encoded["input_ids"][count:], encoded["offset_mapping"][count:]
        start = len(guard) + len(self.between)
        end = start + len(said)
        first = next(i for i, (_, stop) in enumerate(offsets) if stop > start)
        last = next(i for i, (_, stop) in enumerate(offsets) if stop > end)
        return tokens[:first], tokens[first : last + 1]

    def place_in_next(self, user: str, last: int | None) -> int:
        """Count the tokens of `next` before the user's message."""
        tokens = self.tokens_of(self.between + self.plain(user) + self.opening)
        return len(self.message(user)[0]) - len(tokens) + len(self.behind(last, tokens))

    def turn(self, text: str, stop_strings: tuple[str, ...]) -> list[int]:
        """Return the tokens of a turn that is not sampled; an end-of-turn token is added unless a
        stop string ends it."""
        tokens = self.tokens_of(text)
        if not text.endswith(stop_strings) and self.end_of_turn is not None:
            tokens.append(self.end_of_turn)
        return tokens

    def render(
        self,
        messages: list[dict[str, Any]],
        tools: list[Any] | None = None,
        *,
        opens: bool = True,
        **switches: Any,
    ) -> str:
        """Render a whole conversation with the template. `opens`: up to the beginning of the
        policy's turn; `switches`: variables of the template, beside those of the conversation
        format.

        Raises whatever the template does.
        """
        own = {
            "strftime_now": TODAY.strftime,
            "forced_prefix": "",  # of a template that an earlier run exported: it comes after
        }
        return self._tokenizer.apply_chat_template(
            messages,
            tools=tools or None,
            tokenize=False,
            add_generation_prompt=opens,
            **(self.switches | switches | own),
        )

    def tokens_of(self, text: str) -> list[int]:
        """Tokenize `text` by itself; nothing is added."""
        return list(self._remembered(text) if len(text) <= LONGEST else self._encode(text))

    def _encode(self, text: str) -> tuple[int, ...]:
        guard, count = self._guard or ("", 0)
        return tuple(self._encoded(guard + text)[count:])

    def whole_tokens(self, text: str) -> list[int]:
        """Tokenize a text that a conversation begins with."""
        if self._guard is None:
            return self.tokens_of(text)
        return self._encoded(text)

    def _encoded(self, text: str) -> list[int]:
        (encoded,) = self._backend.encode_batch_fast([text], add_special_tokens=False)
        return encoded.ids

    def text_of(self, tokens: list[int]) -> str:
        """Decode sampled tokens, without a stop token at their end."""
        if tokens and tokens[-1] in self.stop_tokens:
            tokens = tokens[:-1]
        short = len(tokens) <= LONGEST_TURN
        return self._texts(tuple(tokens)) if short else self._decode(tokens)

    def decoded(self, tokens: list[int]) -> str:
        """Decode tokens as they are, special ones included."""
        return self._decode(tokens)

    def _decode(self, tokens: Iterable[int]) -> str:
        return self._tokenizer.decode(list(tokens), clean_up_tokenization_spaces=False)

    def last_message(self, tokens: list[int], prefix: str) -> str:
        """Return the last message of the user in the result of `first` or `next`."""
        text = self._decode(tokens)
        text = text.removesuffix(prefix).removesuffix(self.opening)
        _, found, message = text.rpartition(self.between)
        return message if found else text.removeprefix(self._head)

    def _opening_text(self, system: str, user: str, before: Messages, tools: str) -> str:
        short = len(system) + len(user) + sum(len(text) for _, text in before) <= LONGEST
        rendered = self._openings if short else self._rendered_opening
        return rendered(system, user, before, tools)

    def _rendered_opening(self, system: str, user: str, before: Messages, tools: str) -> str:
        messages = self.opening_messages(system, user, before)
        plain = [(role, self.plain(text)) for role, text in messages]
        return self._rendered(plain, parsed(tools) if tools else None)

    def _rendered(self, messages: Iterable[tuple[str, str]], tools: list[Any] | None = None) -> str:
        return self.render([{"role": role, "content": text} for role, text in messages], tools)


def encodable(text: str) -> str:
    """Replace characters that UTF-8 cannot encode, and so no tokenizer reads, by question marks."""
    return text.encode(errors="replace").decode()


class StoredStream(NamedTuple):
    """A stream in a file of this host: tokens int32[L], roles uint8[L], turns int16[L] and logprobs
    float32[L] as bytes, and the runs of its weights."""

    tokens: bytes
    roles: bytes
    turns: bytes
    logprobs: bytes
    weights: list[tuple[WeightId, int]]


class Stream:
    """Token stream of an episode while it grows."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        # Arrays of C numbers, which numpy takes over at once.
        self._roles, self._turns, self._logprobs = array("B"), array("h"), array("f")
        self._weights: list[tuple[WeightId, int]] = []

    def read(self, tokens: list[int], role: Role) -> None:
        """Append tokens that the policy is shown."""
        self.tokens += tokens
        self._note(len(tokens), role, -1)
        self._logprobs.frombytes(bytes(4 * len(tokens)))

    def seen(self, *, withheld: bool) -> list[int]:
        """Return the tokens, if `withheld` those of EXPERIENCE left out."""
        if not withheld:
            return list(self.tokens)
        pairs = zip(self.tokens, self._roles, strict=True)
        return [token for token, role in pairs if role != Role.EXPERIENCE]

    def insert(self, place: int, tokens: list[int], role: Role) -> None:
        """Show tokens before the one at `place`."""
        count = len(tokens)
        self.tokens[place:place] = tokens
        self._roles[place:place] = array("B", [role] * count)
        self._turns[place:place] = array("h", [-1] * count)
        self._logprobs[place:place] = array("f", [0.0] * count)

    def write(self, generation: Generation, turn: int) -> None:
        """Append tokens that the policy sampled."""
        self.tokens += generation.tokens
        self._note(len(generation.tokens), Role.ACTION, turn)
        self._logprobs.extend(generation.logprobs)
        for weights in generation.weights:
            if self._weights and self._weights[-1][0] == weights:
                self._weights[-1] = (weights, self._weights[-1][1] + 1)
            else:
                self._weights.append((weights, 1))

    def _note(self, count: int, role: Role, turn: int) -> None:
        self._roles.frombytes(bytes([role]) * count)
        self._turns.extend((turn,) * count)

    def sequence(self) -> Sequence:
        return Sequence(
            tokens=np.array(self.tokens, np.int32),
            roles=np.array(self._roles, np.uint8),
            turns=np.array(self._turns, np.int16),
            logprobs=np.array(self._logprobs, np.float32),
            versions=[VersionRun(weights=weights, tokens=n) for weights, n in self._weights],
        )

    def stored(self) -> StoredStream:
        return StoredStream(
            array("i", self.tokens).tobytes(),
            self._roles.tobytes(),
            self._turns.tobytes(),
            self._logprobs.tobytes(),
            self._weights,
        )

    def restore(self, stored: StoredStream) -> None:
        """Fill an empty stream."""
        tokens = array("i")
        arrays = tokens, self._roles, self._turns, self._logprobs
        for one, data in zip(arrays, stored[:4], strict=True):
            one.frombytes(data)
        self.tokens, self._weights = tokens.tolist(), stored.weights
