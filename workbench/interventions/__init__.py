"""A step with one thing changed."""
