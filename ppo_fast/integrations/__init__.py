"""One small file per foreign trainer, imported by name: nothing here is imported by the rest of the package."""
