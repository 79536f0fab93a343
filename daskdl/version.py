"""The version of the package, as installed."""

VERSION = "0.1.0"
