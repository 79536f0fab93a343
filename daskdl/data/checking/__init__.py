"""Whether data are as they should be: counted, listed, and moved away if asked for."""
