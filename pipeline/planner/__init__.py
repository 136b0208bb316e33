"""What a run takes before it starts: memory, time, and what to change. Imports no torch."""
