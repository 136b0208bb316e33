"""Starts and supervises a run on one or several machines; launch/*.sh call it."""
