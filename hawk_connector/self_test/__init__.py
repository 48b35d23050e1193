"""A parcel moved on this machine, from a send buffer into simulated banks, and looked at element by element."""
