"""How the reducer learns which gradients have arrived, and which will not."""
