"""The version, said once: packaging reads it here, floors below the package itself import it."""

__version__ = "0.1.0"
