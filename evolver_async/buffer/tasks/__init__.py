"""The task stream: which task is rolled out next."""
