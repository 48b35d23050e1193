"""HAWK: prefill an LLM on GPUs, decode it on NPUs, and move the KV cache in the NPU's own byte order.

This package imports nothing on purpose: ``import hawk_connector`` must stay cheap, since vLLM loads
the plugin in every process it starts.
"""

__version__ = "0.1.0"
