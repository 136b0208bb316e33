"""Examines the machines of a job before it starts: asks every host, and reports each fault with its fix."""
