"""Datasets in the store: pack them, index what is there already, inspect and read them."""
