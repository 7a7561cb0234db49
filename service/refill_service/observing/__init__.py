"""Logs, traces and the ids that tie a request's lines together."""
