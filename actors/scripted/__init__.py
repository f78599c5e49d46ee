"""Scripted episodes of the supervised stages: an expert's actions, branches off them, reasons."""
