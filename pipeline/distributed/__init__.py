"""Ranks, devices, the process group, and what happens when a rank fails. Knows nothing of models."""
