def report(folder, conditions, publish):
    pass
