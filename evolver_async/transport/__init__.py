"""Transport of messages: delivery rules, sessions, sockets, encryption and keys."""
