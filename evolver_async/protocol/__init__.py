"""The protocol between processes: messages, their envelope, and trajectories as bytes."""
