"""Text in, deterministic batches out."""
