"""Metrics: JSONL rows, the lineage they belong to, and their upload to Weights & Biases."""
