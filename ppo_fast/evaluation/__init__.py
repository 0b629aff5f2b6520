"""Held-out evidence: paired statistics, text audits, and the independent judge. Reads results; trains nothing."""
