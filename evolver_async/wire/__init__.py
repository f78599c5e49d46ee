"""Messages between processes: their envelope, delivery rules, sockets, addresses and keys."""
