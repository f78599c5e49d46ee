"""Computation on CPUs alone: decoder passes, attention over trees of rows, bfloat16 products."""
