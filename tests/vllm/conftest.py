"""Processes as a user has them: vLLM starts others of its own. See forked.py."""

import os

os.environ["TEST_EXEC"] = "1"
