"""What does a release publish? ``make release`` builds it from a tag."""
