"""What the user may say: the recipe, the DeepSpeed JSON, and the batch arithmetic. Imports no torch."""
