"""Other ways to send weights and trajectories than plain sockets."""
