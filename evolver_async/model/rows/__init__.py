"""Packed rows: their layout, and trees of rows that begin alike."""
