"""The version of the package, alone in its file so that a build reads it without importing torch."""

__version__ = "0.1.0"
