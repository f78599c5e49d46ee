"""The `tiny` preset: a small Qwen3-shaped model and its tokenizer, made from scratch.

Every word of `WORDS`, and every one that the environments of the run name, is one token, alone and
after a space; all other text falls back to bytes, so every string can be encoded and decoded. It is
saved as an ordinary Hugging Face directory.
"""

from collections.abc import Iterable
from pathlib import Path

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from evolver_async.files import follow_umask
from evolver_async.model.tokenizer import ModelError

INIT_STD = 0.05

WORDS = """
system user assistant
you face two slot machines machine arms arm named phoenix dragon pull pulls one choose maximize
reward rewards per name inside tags tag high low risk stable better best average total expected
pays paid got received each round rounds learn which more
walk walking frozen lake reach goal avoid holes ice hole wall walls edge border start player
left down right up here visited row column rows columns grid map size cell cells you are at is of
the to move moves moved remaining step steps turn turns invalid valid action actions must be answer
format slippery slip direction directions neighbors next around safe fell reached position current
legend symbol symbols state reply respond with most over from on not
a an and any all as ask before but by can could different do done each end error every example
explain failed find first for get give go good had has have history how i if in into it its just
keep last length less like list look lost made make many may mean might my near need new no none now
number only or other out past path pick place plan please possible problem question read result
rule rules same see should show so some stop success take task than that then there they thing think
this time times together too tool try until use used want was way we what when where while why will
without word words wrong yes yet your
zero three four five six seven eight nine ten
push pushes box boxes target targets cliff cliffs
python code program programs function print arguments text call calls run def lambda sum
len max min sorted set list range output interpreter boxed integers return returns value values
search click buy back price lower dollars product products description features option options
page prev color instruction chosen pack item items small large cheap
"""
CAPITALISED = """
you left down right up phoenix dragon the a pull choose answer action actions grid invalid move
turn step start goal hole frozen wall reward position row your it this each only reply remaining
player one two format observation legend walk reach think i no yes
"""
SEPARATORS = [*"0123456789", *"PSFHGO", *"!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~"]
TAGS = [
    opening + name + ">"
    for name in (
        *("think", "reason", "answer", "experience"),
        *("tool_call", "tool_response", "code", "interpreter"),
    )
    for opening in ("<", "</")
]
SPECIAL = ["<|endoftext|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"]
# Two tokens per message: a small model spends most of its time on prompts.
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "<|{{ message['role'] }}|>{{ message['content'] }}<|end|>"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
# A word, digit or mark includes the space before it; a newline or another space is one token.
PRETOKEN = r" ?\|\|| ?[A-Za-z]+| ?[0-9]| ?[^\sA-Za-z0-9]|\s"


def make_tiny(
    directory: str | Path,
    *,
    seed: int,
    hidden_size: int,
    layers: int,
    heads: int,
    intermediate_size: int,
    max_length: int,
    words: Iterable[str] = (),
) -> None:
    """Write the preset's model (random weights by `seed`) and tokenizer to a directory.

    `max_length` is the context in tokens, `words` those that become tokens besides the preset's.
    Raises ModelError if the sizes do not fit together.
    """
    if hidden_size % (2 * heads):
        raise ModelError(
            f"policy.hidden_size: must be an even multiple of {heads} heads, is {hidden_size}"
        )
    tokenizer = make_tokenizer(max_length, words)
    config = tiny_shape(
        tokenizer,
        hidden_size=hidden_size,
        layers=layers,
        heads=heads,
        intermediate_size=intermediate_size,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(config)
    model.save_pretrained(directory)
    follow_umask(*Path(directory).glob("*.safetensors"))
    tokenizer.save_pretrained(directory)


def tiny_shape(
    tokenizer: PreTrainedTokenizerFast,
    *,
    hidden_size: int,
    layers: int,
    heads: int,
    intermediate_size: int,
) -> Qwen3Config:
    """Make the preset's model configuration for the tokenizer's vocabulary and context."""
    ids = tokenizer.get_vocab()
    return Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        head_dim=hidden_size // heads,
        max_position_embeddings=tokenizer.model_max_length,
        initializer_range=INIT_STD,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=ids["<|end|>"],
        pad_token_id=ids["<|endoftext|>"],
    )


def make_tokenizer(max_length: int, words: Iterable[str] = ()) -> PreTrainedTokenizerFast:
    """Make the preset's tokenizer; ids are in the order bytes, words, tags, special tokens.

    `words`, each of ASCII letters alone, follow those of the preset.
    """
    known = dict.fromkeys(WORDS.split())
    known |= dict.fromkeys(word.capitalize() for word in CAPITALISED.split())
    known |= dict.fromkeys([*SEPARATORS, "||", *words])
    space = "Ġ"  # a space in the byte-level alphabet
    pieces = dict.fromkeys(sorted(pre_tokenizers.ByteLevel.alphabet()))
    pieces |= dict.fromkeys(form for word in known for form in (word, space + word))
    # Without merges a piece of text is one token if it is in the vocabulary, else bytes.
    vocab = {piece: index for index, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PRETOKEN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens([AddedToken(tag, normalized=False) for tag in TAGS])
    tokenizer.add_special_tokens([AddedToken(name, normalized=False) for name in SPECIAL])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|end|>",
        pad_token="<|endoftext|>",
        chat_template=CHAT_TEMPLATE,
        model_max_length=max_length,
        clean_up_tokenization_spaces=False,
    )
