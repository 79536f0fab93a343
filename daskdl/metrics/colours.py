"""Colours that differ for every kind of eye: Okabe and Ito, without yellow."""

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
DASHES = ("-", "--", ":")
PALE = "#BBBBBB"
DARK = "#555555"
