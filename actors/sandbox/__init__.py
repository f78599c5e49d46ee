"""Runs programs that nobody trusts: in confined interpreters, kept warm, each in a fork of its own.

`pool.py` is the door (`Pool.run`), `process.py` one confined interpreter seen from outside,
`namespaces.py` the script that shuts it in (namespaces, or bubblewrap), `guest.py` what runs in
there, `seccomp.py` the system calls it may not make.
"""
