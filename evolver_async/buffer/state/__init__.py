"""The state of the buffer: a pure function of the records in its log."""
