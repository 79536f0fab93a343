"""What users may hang into a run, and what of that comes with daskdl."""
