"""Commands: `python -m pipeline NAME` and `launch/train.py`."""
