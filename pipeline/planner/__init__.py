"""Planner: memory and time of a run before it starts, and changes that help. Imports no torch."""
