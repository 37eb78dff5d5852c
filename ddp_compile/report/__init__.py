"""What was measured and what was decided, as data, and how it is shown. Nothing here communicates or runs a model."""
