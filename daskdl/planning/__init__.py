"""What a cluster would be worth: costs measured here, predictions from them."""
