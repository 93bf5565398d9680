"""What a run leaves: its folder, metrics, panel, report, comparison, timeline and trackers."""
