"""Embedder for a local sentence-transformers directory: an encoder whose states are pooled.

Of such a directory only `1_Pooling/config.json` and `sentence_bert_config.json` are read; the
default is the mean of at most `MAX_TOKENS` tokens. It runs on the CPU, as queries are short.

It does not use the package sentence-transformers, which is shorter by some 40 lines but brings
scikit-learn and scipy: transformers imports both in every process as soon as they are installed.
"""

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModel, AutoTokenizer

from evolver_async.files import parsed

MAX_TOKENS = 512
BATCH = 32
DIGESTED = (".json", ".safetensors", ".bin", ".txt", ".model")  # files of a model
POOLINGS = {  # sentence-transformers' names
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "cls",
    "pooling_mode_lasttoken": "last",
}


class TransformerEmbedder:
    """Embedder on an encoder; see `actors/experience/embed.py: Embedder`.

    Raise ValueError if the directory holds no model that embeds.
    """

    def __init__(self, directory: str) -> None:
        try:
            self._load(Path(directory))
            self.embed(["a text"])  # not every model does
        except Exception as error:  # libraries raise classes of their own for a torn file
            problem = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            raise ValueError(f"experience.embedder: {directory}: {problem}") from error

    def _load(self, path: Path) -> None:
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


def _digest(path: Path) -> str:
    """Digest what vectors depend on: weights, tokenizer and configurations, wherever they lie."""
    digest = hashlib.blake2b(digest_size=6)
    files = filter(Path.is_file, path.iterdir())  # a cache can have links to what was removed
    for one in sorted(found for found in files if found.suffix in DIGESTED):
        with one.open("rb") as file:
            digest.update(hashlib.file_digest(file, "blake2b").digest())
    return digest.hexdigest()


def _pooling(path: Path) -> str:
    config = _read(path / "1_Pooling" / "config.json")
    modes = [name for name, on in config.items() if on is True]
    wanted = [name for name in modes if name.startswith("pooling_mode_")]
    if not wanted:
        return "mean"
    if len(wanted) > 1 or wanted[0] not in POOLINGS:
        raise ValueError(f"pooling {', '.join(wanted)} is not supported")
    return POOLINGS[wanted[0]]


def _read(path: Path) -> dict[str, Any]:
    return parsed(path.read_text(encoding="utf-8")) if path.is_file() else {}
