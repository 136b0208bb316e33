"""Held-out loss, samples, and a trained model read from its checkpoint."""
