"""Formats of a turn: chat template, thoughts, answers and tool calls, written and read."""
