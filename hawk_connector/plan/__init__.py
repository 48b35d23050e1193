"""What moves: who pairs with whom, how a transfer is cut into parcels and streams, and which reads fetch them."""
