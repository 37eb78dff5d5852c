"""The inputs of every kernel, and its required results."""
