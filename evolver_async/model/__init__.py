"""The policy model: its loading, log-probs, attention, adapters and tokenizer."""
