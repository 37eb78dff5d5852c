"""Communication between ranks: process groups, collectives, messages, streams, and their errors."""
