"""Passes over forward graphs."""
