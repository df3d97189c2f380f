"""What a rank keeps and updates: layouts, buckets, parameters, optimizers, and state on the host."""
