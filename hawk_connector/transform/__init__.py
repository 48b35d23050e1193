"""Re-ordering a parcel from the prefill side's cache into the decode side's bytes."""
