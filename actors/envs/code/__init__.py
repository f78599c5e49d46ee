"""Questions that the policy answers with programs, run in the sandbox."""
