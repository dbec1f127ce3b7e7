"""What runs in an engine's process: its kernel, its agent, its groups."""
