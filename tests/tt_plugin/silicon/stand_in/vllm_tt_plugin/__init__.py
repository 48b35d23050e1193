"""A stand-in for Tenstorrent's vLLM plugin: what `contract.py` records of it, with a model that computes nothing."""
