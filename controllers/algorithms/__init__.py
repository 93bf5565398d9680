"""What a training step computes: presets, losses, critic, reference, preferences, schedules."""
