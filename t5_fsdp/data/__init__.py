"""Documents in, token ids and batches out."""
