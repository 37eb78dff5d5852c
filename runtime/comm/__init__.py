"""What one rank tells another: process groups, collectives, messages, streams, and the errors of it."""
