"""One turn of an exported policy, with transformers alone.

python examples/reply.py EXPORT "system message" "first message of the user"
"""

import sys

from transformers import AutoModelForCausalLM, AutoTokenizer


def reply(export: str, messages: list[dict[str, str]]) -> str:
    """Generate the turn that follows `messages` with the settings of the export."""
    tokenizer = AutoTokenizer.from_pretrained(export)
    model = AutoModelForCausalLM.from_pretrained(export)
    prompt = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_dict=True, return_tensors="pt"
    )
    output = model.generate(**prompt, tokenizer=tokenizer)
    return tokenizer.decode(output[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True)


if __name__ == "__main__":
    export, system, user = sys.argv[1:]
    conversation = [{"role": "system", "content": system}, {"role": "user", "content": user}]
    print(reply(export, conversation))
