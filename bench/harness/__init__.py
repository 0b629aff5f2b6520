"""The bench runner: cases, variants and bars as data; values checked before they are timed; ratios within one run."""
