"""The decode side: pulls parcels and lands them."""
