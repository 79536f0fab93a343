"""From the files users have to arrays: one format in each file."""
