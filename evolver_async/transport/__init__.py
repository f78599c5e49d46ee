"""Transport of messages: delivery rules, sockets, addresses and keys."""
