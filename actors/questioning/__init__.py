"""Self-Questioning: tasks that the system sets itself.

profile      what an environment is, in words, for a language model
explore      what an exploration is, and a language model that explores
replay       what actions lead to in a fresh instance
synthesize   explorations → candidates for tasks, each with a reference solution
filters      which candidates become tasks: not empty, not known, feasible
grade        what an episode of a task is worth that the environment cannot check
questioner   all of it, for one actor
"""
