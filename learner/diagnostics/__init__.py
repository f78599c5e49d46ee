"""Diagnostics of a step: off-policyness, rollouts, alarms, stop rules and samples."""
