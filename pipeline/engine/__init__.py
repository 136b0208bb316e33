"""Engines that make optimizer steps: plain PyTorch, DeepSpeed, and pipeline stages."""
