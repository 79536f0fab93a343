"""Contestants, one small script each.

All take the same arguments, do the same work, and print one line of JSON. Packages
beyond torch and scikit-learn are pinned in `requirements.txt`, in this folder.
"""
