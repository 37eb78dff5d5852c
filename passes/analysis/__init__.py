"""What several passes ask of a graph."""
