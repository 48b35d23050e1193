"""The prefill side: reads vLLM's cache, packs parcels, offers them."""
