"""`hawk bench handover`: how long a request stands between its prefill side's answer and its first decoded token."""
