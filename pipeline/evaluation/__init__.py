"""Held-out loss, evaluation tasks, samples, conversations, a server, and the sources of a trained model."""
