"""What is done with a model that is there: measured, and asked."""
