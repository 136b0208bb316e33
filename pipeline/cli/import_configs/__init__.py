"""Imports configurations of other trainers as a recipe and a DeepSpeed JSON, with one module per trainer."""
