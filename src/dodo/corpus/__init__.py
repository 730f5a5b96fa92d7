"""Many documents compressed into a folder."""
