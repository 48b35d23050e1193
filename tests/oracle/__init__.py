"""A second, independent statement of every byte that HAWK moves: slow, scalar, sharing no code with it."""
