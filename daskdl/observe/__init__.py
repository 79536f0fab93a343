"""Record of a fit for its user: history, timeline, plots and HTML report."""
