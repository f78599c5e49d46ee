"""Runs programs that nobody trusts: in confined interpreters, kept warm, each in a fork of its own.

`pool.py` is the door (`Pool.run`), `cell.py` one confined interpreter seen from outside,
`confine.py` the script that shuts it in (namespaces, or bubblewrap), `inside.py` what runs in
there, `seccomp.py` the system calls it may not make.
"""
