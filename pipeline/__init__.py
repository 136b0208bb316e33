"""A DeepSpeed training pipeline. Importing it loads neither torch nor DeepSpeed; the parts do."""
