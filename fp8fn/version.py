"""The version of the package, in its own file so that a build can read it without importing torch."""

__version__ = "0.1.0"
