"""Embedders for a local sentence-transformers directory: by the package itself, or without it.

The package reads every such directory. It is an extra, imported only where an embedder is loaded:
it brings scikit-learn and scipy, which transformers imports in every process as soon as they are
installed. Without it an encoder's states are pooled here: the mean, first or last of at most
`MAX_TOKENS` tokens, which is what most of the small directories say. A directory that says more is
refused. Both run on the CPU, as queries are short.
"""

import hashlib
import importlib
import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModel, AutoTokenizer

from evolver_async.files import parsed

MAX_TOKENS = 512
BATCH = 32
PACKAGE = "sentence_transformers"
NEEDED = "needs the extra embedder (pip install 'evolver-async[embedder]')"
DIGESTED = (".json", ".safetensors", ".bin", ".txt", ".model")  # files of a model
POOLINGS = {  # sentence-transformers' names, of version 6 and of earlier ones
    "mean": "mean",
    "cls": "cls",
    "lasttoken": "last",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "cls",
    "pooling_mode_lasttoken": "last",
}


def load(directory: str) -> "PackageEmbedder | TransformerEmbedder":
    """Load the embedder of a directory, by the package if that is installed.

    A directory of a plain encoder, without `modules.json`, is none of the package's. Raise
    ValueError if the directory holds no model that embeds.
    """
    if (Path(directory) / "modules.json").is_file() and importlib.util.find_spec(PACKAGE):
        return PackageEmbedder(directory)
    return TransformerEmbedder(directory)


class PackageEmbedder:
    """Embedder by sentence-transformers; see `actors/experience/embed.py: Embedder`.

    Raise ValueError if the package cannot load the directory.
    """

    def __init__(self, directory: str) -> None:
        path = Path(directory)
        try:
            package = importlib.import_module(PACKAGE)
            self._model: Any = package.SentenceTransformer(
                str(path), device="cpu", local_files_only=True
            )
            self.dimensions = self._encoded(["a text"]).shape[1]
        except Exception as error:  # libraries raise classes of their own for a torn file
            raise _refusal(directory, error) from error
        self.name = f"{path.resolve().name}-{PACKAGE}-{_digest(path)}"

    def embed(self, texts: list[str]) -> np.ndarray:
        """Return float32[n, d] with rows of length 1 (0 for an empty text)."""
        vectors = np.zeros((len(texts), self.dimensions), np.float32)
        filled = [place for place, text in enumerate(texts) if text.strip()]
        if filled:
            vectors[filled] = self._encoded([texts[place] for place in filled])
        return vectors

    def _encoded(self, texts: list[str]) -> np.ndarray:
        return np.asarray(
            self._model.encode(
                texts, batch_size=BATCH, show_progress_bar=False, normalize_embeddings=True
            ),
            np.float32,
        )


class TransformerEmbedder:
    """Embedder on an encoder; see `actors/experience/embed.py: Embedder`.

    Raise ValueError if the directory holds no model that embeds.
    """

    def __init__(self, directory: str) -> None:
        try:
            self._load(Path(directory))
            self.embed(["a text"])  # not every model does
        except Exception as error:  # libraries raise classes of their own for a torn file
            raise _refusal(directory, error) from error

    def _load(self, path: Path) -> None:
        if beyond := _beyond(path):
            raise ValueError(f"{beyond}, which {NEEDED}")
        self._tokenizer: Any = AutoTokenizer.from_pretrained(path, local_files_only=True)
        if self._tokenizer.pad_token is None:  # padding is masked, whatever token it is
            self._tokenizer.pad_token = self._tokenizer.eos_token
        self._model: Any = AutoModel.from_pretrained(path, local_files_only=True).eval()
        self._pooling = _pooling(path)
        limit = _read(path / "sentence_bert_config.json").get("max_seq_length") or MAX_TOKENS
        positions = getattr(self._model.config, "max_position_embeddings", None) or limit
        self._max_tokens = min(limit, positions)
        self.dimensions = int(self._model.config.hidden_size)
        self.name = f"{path.resolve().name}-{self._pooling}-{_digest(path)}"

    def embed(self, texts: list[str]) -> np.ndarray:
        """Return float32[n, d] with rows of length 1 (0 if a text has no tokens)."""
        parts = [self._batch(texts[i : i + BATCH]) for i in range(0, len(texts), BATCH)]
        return np.concatenate(parts) if parts else np.zeros((0, self.dimensions), np.float32)

    @torch.inference_mode()
    def _batch(self, texts: list[str]) -> np.ndarray:
        limits = {"truncation": True, "max_length": self._max_tokens}
        inputs = self._tokenizer(texts, padding=True, return_tensors="pt", **limits)
        told_B = inputs["attention_mask"].bool().any(1).numpy()
        if not told_B.all():  # a model has no states of nothing
            vectors = np.zeros((len(texts), self.dimensions), np.float32)
            vectors[told_B] = self.embed([texts[place] for place in np.flatnonzero(told_B)])
            return vectors
        states_BTD = self._model(**inputs).last_hidden_state.float()
        mask_BT1 = inputs["attention_mask"][:, :, None].float()
        if self._pooling == "mean":
            pooled_BD = (states_BTD * mask_BT1).sum(1) / mask_BT1.sum(1).clamp(min=1.0)
        else:  # the first or last token, with padding on either side
            places_BT = torch.arange(mask_BT1.shape[1]) * inputs["attention_mask"]
            last_B = places_BT.argmax(1)
            first_B = inputs["attention_mask"].argmax(1)
            place_B = first_B if self._pooling == "cls" else last_B
            pooled_BD = states_BTD[torch.arange(len(texts)), place_B]
        return torch.nn.functional.normalize(pooled_BD, dim=1).numpy()


def _refusal(directory: str, error: Exception) -> ValueError:
    """Return the error of a directory that holds no model that embeds."""
    problem = " ".join(f"{type(error).__name__}: {error}".split())[:300]
    return ValueError(f"experience.embedder: {directory}: {problem}")


def _beyond(path: Path) -> str:
    """Return what a directory says beyond an encoder and a pooling of its states, "" if nothing."""
    kinds = {module["type"].rpartition(".")[2] for module in _modules(path)}
    if more := sorted(kinds - {"Transformer", "Pooling", "Normalize"}):
        return f"it has modules of type {', '.join(more)}"
    settings = _read(path / "config_sentence_transformers.json")
    default = settings.get("default_prompt_name")
    if default and settings.get("prompts", {}).get(default):
        return f"it puts its prompt {default!r} before texts"
    if _read(path / "sentence_bert_config.json").get("do_lower_case"):
        return "it has do_lower_case"
    return ""


def _digest(path: Path) -> str:
    """Digest what vectors depend on: weights, tokenizer and configurations, wherever they lie."""
    digest = hashlib.blake2b(digest_size=6)
    files = filter(Path.is_file, path.rglob("*"))  # a cache can have links to what was removed
    for one in sorted(found for found in files if found.suffix in DIGESTED):
        with one.open("rb") as file:
            digest.update(hashlib.file_digest(file, "blake2b").digest())
    return digest.hexdigest()


def _pooling(path: Path) -> str:
    """Return mean, cls or last. Raise ValueError, naming the extra, for another pooling."""
    listed = {module["type"].rpartition(".")[2]: module["path"] for module in _modules(path)}
    config = _read(path / listed.get("Pooling", "1_Pooling") / "config.json")
    modes = [name for name, on in config.items() if on is True]
    wanted = [name for name in modes if name.startswith("pooling_mode_")]
    if "pooling_mode" in config:
        named = config["pooling_mode"]
        wanted = [named] if isinstance(named, str) else [*named]
    if not wanted:
        return "mean"
    if len(wanted) > 1 or wanted[0] not in POOLINGS:
        raise ValueError(f"it pools by {', '.join(wanted)}, which {NEEDED}")
    return POOLINGS[wanted[0]]


def _modules(path: Path) -> list[dict[str, Any]]:
    """Return what the directory lists: `type`, a class's path, and `path`, its folder."""
    return _read(path / "modules.json") or []


def _read(path: Path) -> Any:
    """Return the content of a JSON file, {} if there is none."""
    return parsed(path.read_text(encoding="utf-8")) if path.is_file() else {}
