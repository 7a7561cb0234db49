"""Who holds the connections of all processes of a machine, where each for itself would be too many?"""
