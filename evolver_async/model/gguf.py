"""Conversion of a .gguf file to a Hugging Face model directory, which is what a run trains.

transformers reads the file (with the packages `gguf` and `accelerate`) and dequantizes its weights,
but refuses to save such a model: its weights are copied into a fresh one of the same shape.

`python -m evolver_async.model.gguf FILE DIRECTORY` converts one; a run does it by itself.
"""

import copy
import shutil
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from evolver_async.files import follow_umask
from evolver_async.model.tokenizer import ModelError

SUFFIX = ".gguf"


def convert(source: Path, directory: Path) -> None:
    """Write the model and the tokenizer of a .gguf file to `directory`, in float32.

    The directory appears whole or not at all. ModelError names the file, or the missing package.
    """
    missing = [name for name in ("gguf", "accelerate") if find_spec(name) is None]
    if missing:
        raise ModelError(
            f"{source} needs {' and '.join(missing)}: pip install 'evolver-async[gguf]'"
        )
    given = {"gguf_file": source.name, "local_files_only": True}
    try:
        tokenizer = AutoTokenizer.from_pretrained(source.parent, **given)
        read = AutoModelForCausalLM.from_pretrained(source.parent, dtype=torch.float32, **given)
    except (OSError, ValueError, KeyError, NotImplementedError) as error:
        raise ModelError(f"{source} is not a model that transformers reads: {error}") from error
    if not tokenizer.chat_template:
        raise ModelError(f"{source} has no chat template")
    config = copy.deepcopy(read.config)
    if hasattr(config, "quantization_config"):  # the weights are no longer quantized
        delattr(config, "quantization_config")
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(**config.to_dict()), dtype=torch.float32
    )
    model.load_state_dict(read.state_dict())
    model.generation_config = read.generation_config
    directory.parent.mkdir(parents=True, exist_ok=True)
    part = Path(tempfile.mkdtemp(prefix=f".{directory.name}-", dir=directory.parent))
    try:
        model.save_pretrained(part)
        follow_umask(*part.glob("*.safetensors"))
        tokenizer.save_pretrained(part)
        part.chmod(0o755)  # mkdtemp makes it private
        part.rename(directory)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
