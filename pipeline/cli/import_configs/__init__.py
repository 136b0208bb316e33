"""Configurations of other trainers -> a recipe and a DeepSpeed JSON. One module a trainer: its tables."""
