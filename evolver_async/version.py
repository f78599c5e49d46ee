"""Version of the package, which also runs where it is not installed."""

VERSION = "0.1.0"
