"""The conditions for replicating a module, and for keeping it replicated."""
