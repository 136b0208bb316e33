"""Configuration: recipe, DeepSpeed JSON, command-line overrides and their checks. Imports no torch."""
