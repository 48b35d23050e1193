"""`hawk bench`: what packing and moving KV takes on this machine, contestants side by side."""
