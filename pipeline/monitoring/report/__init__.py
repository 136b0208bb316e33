"""What a run's files say of it, as one page: a view of metrics.jsonl that keeps nothing of its own."""
