"""The process that starts, watches and heals engines, and the processes that it starts for it."""
