"""How bytes travel: one-sided reads of KV (engines) and small control messages (the side channel)."""
