"""Size of the chunks in which hidden states are projected onto the vocabulary. No torch."""

LOGITS = {False: 1 << 25, True: 1 << 27}  # of a chunk, and on a GPU


def chunk_tokens(logprob_chunk: int, vocabulary: int, *, gpu: bool) -> int:
    """Return the tokens of one chunk by `learner.logprob_chunk`; 0: as many as `LOGITS` permits."""
    return logprob_chunk or max(1, LOGITS[gpu] // vocabulary)
