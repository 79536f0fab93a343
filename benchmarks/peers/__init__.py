"""Ways of training that are measured side by side, one small script each.

All take the same arguments, do the same work, and print one line of JSON. What a script
needs beyond torch and scikit-learn is pinned in `requirements.txt`, in this folder.
"""
