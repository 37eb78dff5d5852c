"""Passes over backward graphs."""
