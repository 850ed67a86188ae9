"""The rollout engine: request -> schedule -> plan -> forward -> sample. Knows nothing of threads, training or
rewards."""
