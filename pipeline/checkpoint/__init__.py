"""Saves, restores, verifies and exports checkpoints. Knows no engine."""
