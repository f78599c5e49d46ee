"""The replay buffer: the only rendezvous of actors and learner.

Pure parts: `replay` (groups, admission, staleness, takes), `ledger`, `tasks`, `evaluations`,
`leases`. `state` puts the durable ones together: it changes by `records` alone, which `journal`
keeps on disk (`segment` has its bytes, `disk` what the space left allows). `service` answers
requests: it decides, appends a record, applies it; `status` says what it holds.
"""
