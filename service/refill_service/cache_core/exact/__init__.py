"""Caches that return exactly the sample that is asked for, and know or guess what comes."""
