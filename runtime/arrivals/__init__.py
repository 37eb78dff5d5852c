"""How the reducer learns which gradients have come, and which will not."""
