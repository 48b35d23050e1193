"""A directory for PYTHONPATH: what lies in it changes NIXL in the servers that have it there, and in no others."""
