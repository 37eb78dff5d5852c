"""The bucket plan: data and arithmetic."""
