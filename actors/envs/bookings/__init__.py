"""Bookings: an interface of several services whose conventions are documented nowhere.

`services` holds the services, their conventions and the requests; `env` is the environment.
"""
