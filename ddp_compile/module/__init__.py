"""Replicated modules: the methods that they gain, the state that they carry, and the checks before."""
