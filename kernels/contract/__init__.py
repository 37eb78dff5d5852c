"""What every kernel is given, and what it has to give."""
