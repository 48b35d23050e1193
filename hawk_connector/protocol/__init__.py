"""The protocol: message types and sans-IO state machines for both sides, driven by an injected clock."""
