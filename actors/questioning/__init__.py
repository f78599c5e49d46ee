"""Self-Questioning: synthetic tasks from explorations.

actions      actions in a language model's answers: texts, or calls of tools
profile      description of an environment for a language model, given or made by it
explore      explorations, and a language model that explores
replay       replay of actions in a fresh instance
synthesize   explorations → candidates for tasks, each with a reference solution
filters      candidates → tasks: not empty, not known, feasible when replayed
solve        second solution of a candidate by a language model
grade        rewards of tasks that the environment cannot check
questioner   all of it, for one actor
"""
