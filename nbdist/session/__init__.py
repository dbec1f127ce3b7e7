"""The kernel's half: the cluster as a notebook holds it. Never imports torch."""
