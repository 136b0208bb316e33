"""Metrics of a run, the trackers that receive them, alerts, and the report."""
