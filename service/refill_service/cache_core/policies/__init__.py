"""Policies: what a pod answers, reads and keeps. One file each; ``registry`` knows them by name."""
