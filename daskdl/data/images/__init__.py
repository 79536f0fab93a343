"""Images: from the bytes of a file to an array, and from its path to a label."""
