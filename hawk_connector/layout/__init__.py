"""Where each element of a KV cache lies: axis orders, codecs, channel rules, pools and the catalog of known devices."""
