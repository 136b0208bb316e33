"""Starts a job on one or many machines; launch/*.sh call it."""
