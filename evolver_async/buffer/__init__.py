"""The replay buffer: the only rendezvous of actors and learner.

`service` routes requests to `actor_requests`, `arrivals` and `learner_requests`. Each of these
decides, appends a record to the journal in `log` and applies it to the pure state in `state`.
`tasks` orders the training tasks; `monitor` reports activity, stalls and failures.
"""
