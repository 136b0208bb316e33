"""The training loop, one step of it, and how a run is built."""
