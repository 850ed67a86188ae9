"""The paged KV cache: its tensors, its blocks with reference counts and prefix index, and how large it is."""
