"""What a run shows: the console while it trains, and the report afterwards. Reads results; trains nothing."""
