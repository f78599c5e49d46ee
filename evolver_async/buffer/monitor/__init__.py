"""Monitoring of the buffer: peers, failures, stalls and the STATUS reply."""
