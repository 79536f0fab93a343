"""What comes out for each row, in the form of the collection that came in."""
