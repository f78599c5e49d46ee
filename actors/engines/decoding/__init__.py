"""Steps of the torch engine: KV slots, forward passes, sampling, stops, adoption of weights."""
