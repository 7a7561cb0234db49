"""Jobs whose order is planned: pods that answer any position of any epoch, and remember nothing of what they did."""
