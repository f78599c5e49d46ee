"""Chat templates of ten families of models, each on a tiny tokenizer with the family's marks."""

import json
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

DIRECTORY = Path(__file__).parents[1] / "data" / "templates"
CHATML = "<|im_start|> <|im_end|>"
# By template: the token that ends a turn, the one that begins a text, and further marks.
FAMILIES: dict[str, tuple[str, str, str]] = {
    "qwen2_5": ("<|im_end|>", "", CHATML),
    "qwen3": ("<|im_end|>", "", CHATML),
    "qwen3_5": ("<|im_end|>", "", CHATML),
    "glm4_5": (
        "<|endoftext|>",
        "",
        "[gMASK] <sop> <|system|> <|user|> <|assistant|> <|observation|>",
    ),
    "gpt_oss": (
        "<|return|>",
        "",
        "<|start|> <|channel|> <|message|> <|constrain|> <|end|> <|call|>",
    ),
    "gemma2": ("<eos>", "<bos>", "<start_of_turn> <end_of_turn>"),
    "llama3_1": (
        "<|eot_id|>",
        "<|begin_of_text|>",
        "<|start_header_id|> <|end_header_id|> <|eom_id|> <|python_tag|>",
    ),
    "mistral_v7": (
        "</s>",
        "<s>",
        "[INST] [/INST] [TOOL_CALLS] [TOOL_RESULTS] [/TOOL_RESULTS] [AVAILABLE_TOOLS]"
        " [/AVAILABLE_TOOLS] [SYSTEM_PROMPT] [/SYSTEM_PROMPT]",
    ),
    "kimi_k2": (
        "<|im_end|>",
        "",
        "<|im_system|> <|im_user|> <|im_assistant|> <|im_middle|> <|tool_calls_section_begin|>"
        " <|tool_calls_section_end|> <|tool_call_begin|> <|tool_call_argument_begin|>"
        " <|tool_call_end|>",
    ),
    "deepseek_v3_1": (
        "<｜end▁of▁sentence｜>",
        "<｜begin▁of▁sentence｜>",
        "<｜User｜> <｜Assistant｜> <｜tool▁calls▁begin｜> <｜tool▁calls▁end｜>"
        " <｜tool▁call▁begin｜> <｜tool▁call▁end｜> <｜tool▁sep｜>"
        " <｜tool▁output▁begin｜> <｜tool▁output▁end｜>",
    ),
}
PLAIN = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>")  # no special ones


def template(name: str) -> str:
    """Return the text of a template."""
    return (DIRECTORY / f"{name}.jinja").read_text(encoding="utf-8")


def metaspace_tokenizer(template: str, scheme: str) -> PreTrainedTokenizerFast:
    """One token a character, with SentencePiece's space at the head of each text (`first`), or of
    each piece between special tokens (`always`)."""
    characters = ["<unk>", "\u2581", *(chr(code) for code in (10, *range(33, 127)))]
    vocab = {piece: index for index, piece in enumerate(characters)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    tokenizer.decoder = decoders.Metaspace(prepend_scheme=scheme, split=False)
    tokenizer.add_special_tokens([AddedToken(mark, normalized=False) for mark in ("<s>", "</s>")])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="</s>", bos_token="<s>", chat_template=template
    )


def family_tokenizer(name: str) -> PreTrainedTokenizerFast:
    """One token a byte, besides the family's marks."""
    end, begin, marks = FAMILIES[name]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {piece: index for index, piece in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens([AddedToken(mark, normalized=False) for mark in PLAIN])
    special = dict.fromkeys((end, *marks.split(), *filter(None, (begin,))))
    tokenizer.add_special_tokens([AddedToken(mark, normalized=False) for mark in special])
    begins = {"bos_token": begin} if begin else {}
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=end, chat_template=template(name), **begins
    )


TOOL = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Look somewhere.",
        "parameters": {
            "type": "object",
            "properties": {
                "where": {"type": "string", "description": "a direction"},
                "steps": {"type": "integer", "description": "how far"},
            },
            "required": ["where"],
        },
    },
}
ARGUMENTS = {"where": "up\nleft", "steps": 2}
RESULT = "a door <|im_end|></s><|eot_id|><|end|>"  # spells marks that end turns
QUESTION: list[dict[str, Any]] = [
    {"role": "system", "content": "Find the door."},
    {"role": "user", "content": "Where is it?"},
]


class Family(NamedTuple):
    """A row of the table. `thought`: the key of a message in which the template takes a thought;
    `id`: of the call, where the template writes one; `rewrites`: what the template does to earlier
    turns once the user asks again, which a conversation that only grows does not follow."""

    syntax: str
    thought: str = "content"
    id: str = "000000000"
    as_text: bool = False
    rewrites: tuple[tuple[str, str], ...] = ()


NO_THOUGHTS = (("<think>\nI look.\n</think>\n\n", ""), ("<think>\n\n</think>\n\n", ""))
LISTED = f"[AVAILABLE_TOOLS]{json.dumps([TOOL])}[/AVAILABLE_TOOLS]"
ANALYSIS = "<|start|>assistant<|channel|>analysis<|message|>I look.<|end|>"
TABLE = {
    "qwen2_5": Family("tagged"),
    "qwen3": Family("tagged", "reasoning_content", rewrites=NO_THOUGHTS),
    "qwen3_5": Family("tagged", "reasoning_content", rewrites=NO_THOUGHTS),
    "glm4_5": Family("tagged", "reasoning_content", rewrites=((">I look.</", "></"),)),
    "gpt_oss": Family("harmony", "thinking", rewrites=((ANALYSIS, ""), ("<|return|>", "<|end|>"))),
    "llama3_1": Family("llama", ""),
    "mistral_v7": Family(
        *("mistral", "", "a1B2c3D4e"),
        rewrites=((f"{LISTED}[INST]Wh", "[INST]Wh"), ("[INST]And", f"{LISTED}[INST]And")),
    ),
    "kimi_k2": Family("kimi", "content", "functions.look:7"),
    "deepseek_v3_1": Family("deepseek", "content", as_text=True),
    "gemma2": Family("", "content"),
}
