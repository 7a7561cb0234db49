"""Where datasets lie: one small interface, one file per store."""
