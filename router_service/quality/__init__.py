"""What a KV format costs: perplexity, greedy agreement and bits, measured on a checkpoint."""
