"""The durable log of the buffer: segments, journal, free space, and the store on top."""
