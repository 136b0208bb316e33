"""Report of a run as one HTML page: a view of metrics.jsonl that stores no data of its own."""
