"""How the reducer learns of gradients, and of those that do not come."""
