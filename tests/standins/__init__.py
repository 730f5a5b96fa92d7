"""Local stand-ins for what the tests can't reach: the Hugging Face hub, a package index, a trained tokenizer."""
