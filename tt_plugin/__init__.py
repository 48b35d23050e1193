"""The Tenstorrent side of HAWK: bank tables, KV pools and the vLLM platform of a simulated or real NPU."""
