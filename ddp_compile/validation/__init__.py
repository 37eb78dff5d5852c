"""What a module has to be to be replicated, and to stay so."""
