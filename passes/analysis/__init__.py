"""Questions about graphs that several passes ask."""
