"""What a run measures, where it is sent, and what raises an alert."""
