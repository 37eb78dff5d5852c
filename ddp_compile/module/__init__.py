"""What a module gains when it is replicated, what it carries, and what it is checked for."""
