"""Asynchronous actor-learner reinforcement learning for language-model agents.

              ┌────────────── learner ───────────────────────────┐
  SAMPLE/DONE │ groups → strip → advantage → loss → step → v+1   │ publish(v+1)
              └──────▲───────────────────────────────────┬───────┘
                     │                                   │ weights (shared memory)
              ┌──────┴──────── buffer ────────────┐      ▼
              │ tasks · tickets · journal · replay│   actor × N : engine + episodes + judge
              └──▲──────────────▲─────────────────┘      │   ▲
      LEASE/RENEW│     PUSH     │ ACK after fsync        │   │ RETRIEVE / CONTRIBUTE
                 └──────────────┴────────────────────────┘   experience (0 or 1)
  launcher (serial | local) starts them, supervises them, restarts them, ends them

| loop | process | produces | consumes | waits for | unblocked by |
|---|---|---|---|---|---|
| rollout | actor | trajectories | tickets, weights | a ticket | buffer granting credit |
| ingest | buffer | acks, complete groups | trajectories | the fsync | the disk |
| train | learner | weight versions | complete groups | B groups fresh enough | actors |
| weights | actor | – | weight versions | a newer version | learner publishing |
| experience | experience | guidance, entries | finished episodes | – | – |
"""
