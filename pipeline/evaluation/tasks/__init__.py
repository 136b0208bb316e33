"""Tasks of lm-evaluation-harness that need no network; `documents.py` makes their data."""
