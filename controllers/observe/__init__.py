"""What a run leaves to look at: its folder, metrics, panel, report, comparison, timeline and trackers."""
