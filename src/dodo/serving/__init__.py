"""Serving: many questions over stored contexts at once."""
