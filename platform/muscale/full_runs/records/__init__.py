"""What is to be known of a run while it goes on and afterwards: attempts, incidents, alarms, time well spent."""
