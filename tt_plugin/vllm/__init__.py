"""What vLLM sees of the NPU: a platform, its worker and model runner, and an attention backend."""
