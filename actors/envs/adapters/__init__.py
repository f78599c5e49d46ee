"""Environments of other suites, each behind this project's protocol."""
