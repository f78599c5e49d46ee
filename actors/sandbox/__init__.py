"""Execution of untrusted programs in confined interpreters, each program in a fork of its own.
`interpreters.py` is the interface (`SandboxPool.run`), `process.py` one confined interpreter seen
from outside, `namespaces.py` the script that confines it (namespaces, or bubblewrap), `guest.py`
and `hardening.py` what runs inside, `seccomp.py` the denied system calls."""
