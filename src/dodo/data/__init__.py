"""Training data: reading files, tokenised shards, and the order in which batches come."""
