"""Ways of training: masters, the replica, and the run around them."""
