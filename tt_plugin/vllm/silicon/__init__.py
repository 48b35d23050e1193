"""The overlay on Tenstorrent's own vLLM plugin: what that plugin lacks for KV transfer, and nothing else."""
